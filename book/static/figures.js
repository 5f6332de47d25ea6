// A figure that is drawn smaller than it was made has a larger view: on a phone its words would be too small to read.
// In that view it is as large as it was made or larger, and scrolls.
(() => {
  const LARGER = 1.15; // times its own size: the smallest type of the plots then has 11 px
  const figures = document.querySelectorAll(".bd-article :is(.cell_output, figure) img");
  if (!figures.length || typeof HTMLDialogElement === "undefined") return;

  function view(image) {
    const dialog = Object.assign(document.createElement("dialog"), { className: "figure-view" });
    const close = Object.assign(document.createElement("button"), { type: "button", textContent: "Close" });
    const large = Object.assign(image.cloneNode(), { className: "", id: "" });
    large.removeAttribute("style");
    large.style.width = `${Math.round(LARGER * image.naturalWidth)}px`;
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    dialog.setAttribute("aria-label", "A larger view of the figure");
    dialog.append(close, large);
    document.body.append(dialog);
    dialog.showModal();
  }

  const larger = new Map();
  function look(image) {
    const small = image.naturalWidth > 1.1 * image.clientWidth && image.clientWidth > 0;
    image.classList.toggle("figure-small", small);
    larger.get(image).hidden = !small;
  }

  const watcher = new ResizeObserver((entries) => entries.forEach(({ target }) => look(target)));
  for (const image of figures) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "figure-larger", textContent: "Larger view", hidden: true });
    larger.set(image, button);
    image.after(button);
    button.addEventListener("click", () => view(image));
    image.addEventListener("click", () => image.classList.contains("figure-small") && view(image));
    image.addEventListener("load", () => look(image));
    watcher.observe(image);
  }
})();
