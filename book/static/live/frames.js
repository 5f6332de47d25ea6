// A slider that moves an explorer's picture along one control, without Python. The pictures were computed by
// zero_ref.live when the book was built; they are fetched when the slider is first moved. Where an explorer
// runs (explorer.js) its own controls take this one's place.
(() => {
  const root = new URL("frames/", document.currentScript.src).href;
  const fetching = new Map();

  function fetchFrames(name) {
    if (!fetching.has(name))
      fetching.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `${root}${name}.js`;
        script.onload = () => resolve(window.zeroFrames[name]);
        script.onerror = () => reject(new Error("its pictures could not be fetched"));
        document.head.append(script);
      }));
    return fetching.get(name);
  }

  function rows([head, ...body]) {
    const row = (tag, cells) => {
      const made = document.createElement("tr");
      cells.forEach((words, place) => {
        const cell = document.createElement(place ? tag : "th");
        cell.textContent = words;
        cell.scope = tag === "th" ? "col" : "row";
        if (place && tag === "td") cell.removeAttribute("scope");
        made.append(cell);
      });
      return made;
    };
    const table = document.createElement("table");
    table.createTHead().append(row("th", head));
    table.createTBody().append(...body.map((cells) => row("td", cells)));
    return table;
  }

  function start(section) {
    const { name, label, words, place } = JSON.parse(section.dataset.along);
    const id = `frames-${section.dataset.explorer}-${name}`;
    const input = Object.assign(document.createElement("input"), { id, type: "range", min: 0, max: words.length - 1, step: 1 });
    input.value = place; // after min and max, which would clamp it
    const shown = Object.assign(document.createElement("output"), { htmlFor: id });
    const caption = Object.assign(document.createElement("label"), { htmlFor: id, textContent: label });
    const write = () => {
      shown.textContent = words[Number(input.value)];
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    write();
    input.addEventListener("input", async () => {
      write();
      const note = section.querySelector(".explorer-words");
      try {
        const { answers } = await fetchFrames(section.dataset.explorer);
        const answer = answers[Number(input.value)];
        for (const kind of ["wide", "narrow"]) section.querySelector(`.explorer-${kind}`).innerHTML = answer[kind];
        note.textContent = answer.words;
        section.querySelector(".explorer-table").replaceChildren(rows(answer.table));
        section.dataset.frame = input.value;
      } catch (error) {
        note.textContent = `The picture stands still: ${error.message}.`;
      }
    });
    const control = document.createElement("div");
    control.className = "explorer-control explorer-slider";
    control.append(caption, input, shown);
    const holder = document.createElement("div");
    holder.className = "explorer-frames";
    holder.append(control);
    section.querySelector(".explorer-picture").before(holder);
    if (!section.dataset.state) section.querySelector(".explorer-note")?.remove();
  }

  for (const section of document.querySelectorAll(".explorer[data-along]")) start(section);
})();
