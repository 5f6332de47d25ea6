// Explorers: pictures that the reader can move. Each stands still until its button is pressed; then Python
// (Pyodide) is fetched from this site and runs the package itself, in a worker, one for all explorers of a page.
// Everything that is computed or drawn comes from zero_ref.live; here are only the controls.
(() => {
  const { ask, COST } = window.zeroPython;
  const WAITS_MS = 150; // while a window is being resized

  function make(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function rows(table) {
    const [head, ...body] = table;
    const cell = (tag, words) => make(tag, { textContent: words, ...(tag === "th" ? { scope: "col" } : {}) });
    return make(
      "table",
      {},
      make("thead", {}, make("tr", {}, ...head.map((words) => cell("th", words)))),
      make("tbody", {}, ...body.map(([first, ...others]) =>
        make("tr", {}, make("th", { scope: "row", textContent: first }), ...others.map((words) => cell("td", words))))),
    );
  }

  class Explorer {
    constructor(section) {
      this.name = section.dataset.explorer;
      this.values = JSON.parse(section.dataset.values);
      this.section = section;
      for (const part of ["controls", "note", "picture", "words", "table"])
        this[part] = section.querySelector(`.explorer-${part}`);
      this.inputs = new Map();
      this.note.textContent = "";
      this.button = make("button", { type: "button", className: "explorer-start", textContent: "Move it yourself" });
      this.button.onclick = () => this.start();
      this.note.append(this.button, make("span", { className: "explorer-cost" }));
      this.say(COST);
      section.dataset.state = "still";
    }

    async start() {
      this.button.disabled = true;
      this.say("Python is starting …");
      this.section.dataset.state = "starting";
      try {
        for (const control of await ask({ name: this.name })) this.add(control);
        this.controls.hidden = false;
        await this.draw();
        this.note.remove();
        this.section.dataset.state = "live";
        for (const cost of document.querySelectorAll('[data-state="still"] .explorer-cost')) cost.textContent = "";
        let timer;
        let width = this.width();
        new ResizeObserver(() => {
          clearTimeout(timer);
          timer = setTimeout(() => {
            if (this.width() === width) return;
            width = this.width();
            this.draw();
          }, WAITS_MS);
        }).observe(this.picture);
        this.controls.querySelector("select, input")?.focus({ preventScroll: true });
      } catch (error) {
        this.fail(error.message);
      }
    }

    fail(why) {
      this.section.dataset.state = "failed";
      this.button.disabled = false;
      this.say(`The explorer did not start: ${why}`);
    }

    say(words) {
      this.note.querySelector("span").textContent = ` ${words}`;
    }

    width() {
      return Math.max(280, Math.min(760, Math.floor(this.picture.clientWidth)));
    }

    add({ name, label, kind, value, options, words }) {
      const id = `explorer-${this.name}-${name}`;
      const chosen = this.values[name] ?? value;
      this.values[name] = chosen;
      const place = options.indexOf(chosen);
      let input;
      const shown = make("output", { htmlFor: id });
      if (kind === "choice") {
        input = make("select", { id }, ...options.map((option, i) => new Option(words[i], i, false, i === place)));
        input.onchange = () => this.set(name, options[Number(input.value)]);
      } else if (kind === "tick") {
        input = make("input", { id, type: "checkbox", checked: chosen });
        input.onchange = () => this.set(name, input.checked);
      } else {
        input = make("input", { id, type: "range", min: 0, max: options.length - 1, step: 1 });
        input.value = place; // after min and max, which would clamp it
        const write = () => {
          shown.textContent = words[Number(input.value)];
          input.setAttribute("aria-valuetext", shown.textContent);
        };
        write();
        input.oninput = () => {
          write();
          this.set(name, options[Number(input.value)]);
        };
      }
      this.inputs.set(name, input);
      const caption = make("label", { htmlFor: id, textContent: label });
      const one = make("div", { className: `explorer-control explorer-${kind}` }, caption, input);
      if (kind === "slider") one.append(shown);
      one.append(make("span", { className: "explorer-why", id: `${id}-why` }));
      input.setAttribute("aria-describedby", `${id}-why`);
      this.controls.append(one);
    }

    set(name, value) {
      this.values[name] = value;
      this.draw();
    }

    // While an answer is on its way only the newest setting waits: a slider that is dragged queues nothing up.
    draw() {
      this.again = this.drawing !== undefined;
      this.drawing ??= this.answers().finally(() => {
        this.drawing = undefined;
      });
      return this.drawing;
    }

    async answers() {
      this.section.setAttribute("aria-busy", "true");
      try {
        do {
          this.again = false;
          const asked = JSON.stringify(this.values);
          const answer = await ask({ name: this.name, values: { ...this.values }, width: this.width() });
          this.picture.innerHTML = answer.svg;
          this.words.textContent = answer.words;
          this.table.replaceChildren(rows(answer.table));
          for (const [name, input] of this.inputs) {
            input.disabled = name in answer.idle;
            input.parentElement.querySelector(".explorer-why").textContent = answer.idle[name] ?? "";
          }
          this.section.dataset.shown = asked;
        } while (this.again);
      } finally {
        this.section.removeAttribute("aria-busy");
      }
    }
  }

  function begin() {
    for (const section of document.querySelectorAll(".explorer:not([data-alone])")) new Explorer(section);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
