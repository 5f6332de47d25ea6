// Predictions: what a reader says before a result is shown. It stays in this browser, and nothing is sent.
// Results between a box and its answer, and the text about them, are covered until the reader commits, or asks to see them without.
// The boxes and answers are made by zero_ref_course/predict.py; the points are those of Prediction.points.
(() => {
  const KEY = "zero_ref predictions";
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

  // The outputs of the cells from a box to its answer, and the text about it: up to a heading or a cell with code.
  function covering(box, result) {
    const outputs = [...document.querySelectorAll(".cell_output")];
    const found = outputs.slice(outputs.indexOf(box.closest(".cell_output")) + 1, outputs.indexOf(result.closest(".cell_output")) + 1);
    for (let after = result.closest(".cell").nextElementSibling; after; after = after.nextElementSibling) {
      const folded = after.matches(".cell.tag_hide-input");
      if (after.matches("section, h2, h3, .cell") && !folded) break;
      if (!folded) found.push(after);
    }
    return found;
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
    if (!result) return;
    const known = JSON.parse(result.dataset.known);
    const covered = covering(box, result);
    const place = Object.assign(document.createElement("p"), { className: "prediction-outcome" });
    result.after(place);

    function show() {
      const open = here[name] !== undefined;
      for (const one of covered) one.classList.toggle("prediction-covered", !open);
      form.hidden = open;
      if (!open) told.textContent = `${rule} The results below are covered until then.`.trim();
      else told.textContent = here[name] === SKIPPED ? "Shown without a prediction." : `You predict ${shown(here[name], known)}.`;
      place.textContent = open && here[name] !== SKIPPED ? compared(here[name], known) : "";
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
    form.querySelector(".prediction-skip").addEventListener("click", () => {
      keep(name, SKIPPED);
      show();
    });
    show();
  }

  // A link to a covered figure shows it.
  function follow() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const covered = target && target.closest(".prediction-covered");
    if (!covered) return;
    covered.classList.remove("prediction-covered");
    target.scrollIntoView();
  }

  for (const box of document.querySelectorAll(".prediction")) start(box);
  scores();
  follow();
  addEventListener("hashchange", follow);
})();
