// Predictions: what a reader says before a result is shown. It stays in this browser, and nothing is sent.
// A prediction covers its answer until the reader commits or asks to see it. A line in the gap says what is covered.
// The boxes and answers are made by zero_ref_course/predict.py; the points are those of Prediction.points.
(() => {
  const KEY = "zero_ref predictions";
  const SHOWN = "zero_ref predictions shown"; // "all", or a list of pages
  const SKIPPED = "";

  function kept() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      return {}; // a browser that keeps nothing
    }
  }

  function keep(name, said) {
    here[name] = said;
    try {
      localStorage.setItem(KEY, JSON.stringify({ ...kept(), [name]: said }));
    } catch {
      // then it lasts as long as this page
    }
  }

  const here = kept();

  function points(said, { answer, close }) {
    if (typeof answer === "string" || answer === 0) return said === answer ? 1 : 0;
    const ratio = said / answer;
    return Math.abs(ratio - 1) <= close + 1e-9 ? 1 : ratio >= 0.5 && ratio <= 2 ? 0.5 : 0;
  }

  function shown(said, { unit }) {
    if (typeof said !== "number") return said;
    const digits = Number.isInteger(said) || Math.abs(said) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
    return `${said.toLocaleString("en-US", digits)} ${unit}`.trim();
  }

  function compared(said, known) {
    const { answer } = known;
    const earned = { 1: "One point", 0.5: "Half a point", 0: "No point" }[points(said, known)];
    let how = said === answer ? "right" : "not so";
    if (typeof answer === "number" && said !== answer) {
      const off = said / answer - 1;
      const percent = Math.abs(off) < 10 ? `${Number((100 * Math.abs(off)).toPrecision(2))}` : Math.round(100 * Math.abs(off)).toLocaleString("en-US");
      how = answer === 0 ? `too ${said > 0 ? "high" : "low"}` : `${percent}% too ${off > 0 ? "high" : "low"}`;
    }
    return `You predicted ${shown(said, known)}: ${how}. ${earned}.`;
  }

  const results = new Map([...document.querySelectorAll(".prediction-result")].map((one) => [one.dataset.prediction, one]));

  const pageName = location.pathname.split("/").pop();

  function shownPages() {
    try {
      return JSON.parse(localStorage.getItem(SHOWN)) ?? [];
    } catch {
      return []; // a browser that keeps nothing
    }
  }

  let shownHere = [shownPages()].flat().some((page) => page === "all" || page === pageName);
  const isOpen = (name) => shownHere || here[name] !== undefined;

  const isFolded = (cell) => cell.matches(".cell.tag_hide-input, .cell.tag_hide-cell");
  const ends = (block) => block.matches("section, h1, h2, h3") || (block.matches(".cell") && !isFolded(block));

  // What a prediction covers, in runs of neighbours. First the outputs of the cells from the box to the answer, but for
  // other boxes and the chapter's picture. Then what follows the answer, up to a heading or a cell with code:
  // the text about it and folded figures. A paragraph that leads on to such a cell stays.
  function covering(box, result) {
    const outputs = [...document.querySelectorAll(".cell_output")];
    const picture = [...document.querySelectorAll("section > h2")].find((title) => title.firstChild.textContent.trim() === "The picture")
      ?.parentElement.querySelector(".cell_output img, .cell_output svg")?.closest(".cell_output");
    const runs = outputs
      .slice(outputs.indexOf(box.closest(".cell_output")) + 1, outputs.indexOf(result.closest(".cell_output")) + 1)
      .filter((output) => output !== picture && !output.querySelector(".prediction, .prediction-score") && !output.closest(".prediction-cover"))
      .map((output) => [output]);
    const after = [];
    let next = result.closest(".cell").nextElementSibling;
    for (; next && !ends(next); next = next.nextElementSibling) after.push(next);
    if (next && next.matches(".cell") && !next.querySelector(".prediction-score") && after.length && !after.at(-1).matches(".cell")) after.pop();
    if (after.some((block) => !block.closest(".prediction-cover"))) runs.push(after);
    return runs;
  }

  function counted(run) {
    const within = (what) => run.flatMap((one) => [...(one.matches(what) ? [one] : []), ...one.querySelectorAll(what)]);
    const figures = within(".cell_output").filter((output) => output.querySelector("img, svg, canvas")).length;
    const counts = {
      output: within(".cell_output").length - figures,
      paragraph: run.filter((one) => one.matches("p, ul, ol, blockquote, .math, div.admonition, details")).length,
      table: run.filter((one) => one.matches("table, .pst-scrollable-table-container")).length,
      figure: figures,
    };
    return Object.entries(counts).filter(([, number]) => number).map(([what, number]) => `${number} ${what}${number > 1 ? "s" : ""}`).join(", ");
  }

  const button = (text, className, clicked) => {
    const made = Object.assign(document.createElement("button"), { type: "button", className, textContent: text });
    made.addEventListener("click", clicked);
    return made;
  };

  // A run goes into a box that a search in the page can open, where the browser knows how. A line before it says what is in it.
  function cover(run, commit, show) {
    const cover = Object.assign(document.createElement("div"), { className: "prediction-cover" });
    const gap = Object.assign(document.createElement("p"), { className: "prediction-gap", textContent: `Covered: ${counted(run)}. ` });
    gap.append(button("Commit", "prediction-commit", commit), ", or ", button("show", "prediction-show", show), ".");
    run[0].before(gap, cover);
    cover.append(...run);
    cover.addEventListener("beforematch", show);
    return (open) => {
      gap.hidden = open;
      if (open) cover.removeAttribute("hidden");
      else cover.setAttribute("hidden", "until-found");
    };
  }

  function scores() {
    for (const place of document.querySelectorAll(".prediction-score")) {
      const names = JSON.parse(place.dataset.predictions);
      const made = names.filter((name) => here[name] !== undefined && here[name] !== SKIPPED && results.has(name));
      const sum = made.reduce((total, name) => total + points(here[name], JSON.parse(results.get(name).dataset.known)), 0);
      const rest = names.length - made.length;
      place.textContent = `Predictions of this chapter: ${sum} of ${names.length} points${rest ? `, ${rest} not predicted` : ""}.`;
    }
  }

  function start(box) {
    const name = box.dataset.prediction;
    const result = results.get(name);
    const form = box.querySelector("form");
    const field = form.querySelector("input, select");
    const told = box.querySelector(".prediction-said");
    const rule = told.textContent;
    const known = JSON.parse(result.dataset.known);
    const skip = () => {
      keep(name, SKIPPED);
      show();
    };
    const commit = () => field.focus();
    const covers = covering(box, result).map((run) => cover(run, commit, skip));
    const place = Object.assign(document.createElement("p"), { className: "prediction-outcome" });
    result.after(place);

    function show() {
      const open = isOpen(name);
      const said = here[name] ?? SKIPPED;
      for (const set of covers) set(open);
      form.hidden = open;
      if (!open) told.textContent = rule;
      else told.textContent = said === SKIPPED ? "Shown without a prediction." : `You predict ${shown(said, known)}.`;
      place.textContent = open && said !== SKIPPED ? compared(said, known) : "";
      scores();
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const typed = field.value.trim();
      const said = typeof known.answer === "number" ? Number(typed.replaceAll(",", "")) : typed;
      if (typed === "" || Number.isNaN(said)) {
        told.textContent = typeof known.answer === "number" ? "A number is asked for." : "Choose one.";
        field.focus();
        return;
      }
      keep(name, said);
      show();
    });
    form.querySelector(".prediction-skip").addEventListener("click", skip);
    shows.push(show);
    show();
  }

  // One switch for this page and one for all pages, before the first box.
  function switches(first) {
    const line = Object.assign(document.createElement("p"), { className: "prediction-switches" });
    first.before(line);
    const keepShown = (pages) => {
      try {
        localStorage.setItem(SHOWN, JSON.stringify(pages));
      } catch {
        // then it lasts as long as this page
      }
      shownHere = [pages].flat().some((page) => page === "all" || page === pageName);
      for (const show of shows) show();
      fill();
    };
    const others = () => [shownPages()].flat().filter((page) => page !== "all" && page !== pageName);
    function fill() {
      const all = shownPages() === "all";
      line.replaceChildren();
      if (shownHere) {
        line.append(all ? "The answers of the whole book are shown. " : "The answers of this page are shown. ");
        line.append(button("Cover them again", "prediction-cover-all", () => keepShown(all ? [] : others())));
      } else {
        line.append("Each answer is covered until you commit a prediction. ");
        line.append(button("Show all on this page", "prediction-show-page", () => keepShown([...others(), pageName])), " ");
        line.append(button("Show all in the book", "prediction-show-book", () => keepShown("all")));
      }
    }
    fill();
  }

  // A link to a covered figure shows it, also where the browser does not do so by itself.
  function follow() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const covered = target && target.closest(".prediction-cover[hidden]");
    if (!covered) return;
    covered.dispatchEvent(new Event("beforematch"));
    target.scrollIntoView();
  }

  const shows = [];
  // An answer that lies between a box and another answer is covered by its own box, so inner boxes come first.
  const boxes = [...document.querySelectorAll(".prediction")].filter((box) => results.has(box.dataset.prediction));
  for (const box of [...boxes].reverse()) start(box);
  if (boxes.length) switches(boxes[0].closest(".cell"));
  scores();
  follow();
  addEventListener("hashchange", follow);
})();
