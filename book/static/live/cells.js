// Cells to edit and run in the page: those with the tag `try-it`. What runs before a cell is known from
// book/_ext/try_it.py; it is run anew each time, so a result follows from what stands on the page.
(() => {
  const { ask, stop, COST } = window.zeroPython;
  const INDENT = "    ";
  const WAITS_MS = 400; // before the page says that a cell is running: most have run by then

  const byId = new Map();

  function make(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  class Cell {
    constructor(script) {
      const { cell, before, source } = JSON.parse(script.textContent);
      Object.assign(this, { before, source });
      byId.set(cell, this);
      this.place = script.parentElement;
      this.code = this.place.querySelector(".cell_input");
      this.printed = [...this.place.querySelectorAll(".cell_output > .output.stream, .cell_output > .output.text_plain")];
      this.note = make("span", { className: "try-it-note", id: `try-${cell}-note`, role: "status", textContent: COST });
      this.button = make("button", { type: "button", className: "try-it-run", textContent: "Edit and run" });
      this.button.onclick = () => this.pressed();
      this.back = make("button", { type: "button", className: "try-it-back", textContent: "As it was", hidden: true });
      this.back.onclick = () => this.restore();
      this.bar = make("div", { className: "try-it-bar" }, this.button, this.back, this.note);
      script.after(this.bar);
    }

    // What the reader has made of the cell.
    get text() {
      return this.editor ? this.editor.value : this.source;
    }

    pressed() {
      if (this.running) stop(this.running, "Stopped.");
      else if (this.editor && !this.editor.hidden) this.run();
      else this.edit();
    }

    edit() {
      if (!this.editor) {
        this.editor = make("textarea", { className: "try-it-editor", spellcheck: false, wrap: "off", value: this.source });
        for (const [name, value] of [["autocapitalize", "off"], ["autocomplete", "off"], ["autocorrect", "off"]])
          this.editor.setAttribute(name, value);
        this.editor.setAttribute("aria-label", "The code of this cell");
        this.editor.setAttribute("aria-describedby", this.note.id);
        this.editor.oninput = () => this.fit();
        this.editor.onkeydown = (event) => this.key(event);
        this.code.after(this.editor);
        this.result = make("div", { className: "try-it-result", tabIndex: 0, role: "region" });
        this.result.setAttribute("aria-label", "What your code prints");
        if (this.printed.length) this.printed[0].before(this.result);
        else this.bar.after(this.result);
      }
      this.show(true);
      this.fit();
      this.editor.focus({ preventScroll: true });
      this.run();
    }

    restore() {
      if (this.running) stop(this.running, "Stopped.");
      this.editor.value = this.source;
      this.show(false);
      this.note.textContent = "";
      this.button.focus({ preventScroll: true });
    }

    show(edited) {
      this.code.hidden = edited;
      this.editor.hidden = !edited;
      this.result.hidden = true;
      this.back.hidden = !edited;
      for (const one of this.printed) one.hidden = false;
      this.button.textContent = edited ? "Run" : "Edit and run";
    }

    fit() {
      this.editor.rows = this.editor.value.split("\n").length;
    }

    // Tab leaves the editor, as everywhere on the page. A new line begins below the line before it.
    key(event) {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      if (event.shiftKey || event.ctrlKey || event.metaKey) {
        if (!this.running) this.run();
        return;
      }
      const line = this.editor.value.slice(0, this.editor.selectionStart).split("\n").at(-1);
      const indent = line.match(/^ */)[0] + (/:\s*$/.test(line) ? INDENT : "");
      // Unlike setRangeText it leaves the reader an undo.
      document.execCommand("insertText", false, `\n${indent}`);
    }

    async run() {
      const before = this.before.map((piece) => (typeof piece === "string" ? piece : byId.get(piece.cell).text));
      const answer = ask({ cell: { before, source: this.text } });
      this.running = answer.id ?? true;
      this.button.textContent = "Stop";
      this.place.dataset.trial = "running";
      const timer = setTimeout(() => this.say(started ? "running …" : "Python is starting …"), WAITS_MS);
      let ended = "Shift + Enter runs it.";
      try {
        const { printed, error } = await answer;
        started = true;
        const shown = [];
        if (printed) shown.push(make("pre", { textContent: printed }));
        if (error) shown.push(make("pre", { className: "try-it-error", textContent: error }));
        this.result.replaceChildren(...shown);
        this.result.hidden = !shown.length;
        for (const one of this.printed) one.hidden = true;
        this.place.dataset.trial = error ? "raised" : "ran";
        if (error) ended = "It raised an error. Shift + Enter runs it.";
        else if (!printed) ended = "It printed nothing. Shift + Enter runs it.";
      } catch (error) {
        this.place.dataset.trial = "failed";
        ended = error.message === "Stopped." ? error.message : `It did not run: ${error.message}`;
      } finally {
        clearTimeout(timer);
        this.running = undefined;
        this.button.textContent = this.editor.hidden ? "Edit and run" : "Run";
        this.say(ended);
      }
    }

    say(words) {
      this.note.textContent = words;
    }
  }

  let started = false; // whether Python has answered a cell of this page
  for (const script of document.querySelectorAll("script.try-it")) new Cell(script);
})();
