// How far a reader has come: a tick in the sidebar beside each chapter whose end was reached. It stays in this
// browser, and nothing is sent. "Start again" at the foot of the sidebar takes ticks and predictions back.
(() => {
  const READ = "zero_ref read";
  const KEPT = [READ, "zero_ref predictions", "zero_ref predictions shown"];
  const isChapter = (path) => /\/notebooks\/\d\d_\w+\.html$/.test(path);

  function read() {
    try {
      return JSON.parse(localStorage.getItem(READ)) ?? [];
    } catch {
      return []; // a browser that keeps nothing
    }
  }

  const nameOf = (path) => path.split("/").pop();
  const sidebar = document.querySelector(".bd-sidebar-primary nav.bd-links, nav.bd-links");
  if (!sidebar) return;

  function tick() {
    const done = new Set(read());
    for (const link of sidebar.querySelectorAll("a.reference.internal")) {
      const path = new URL(link.href, location.href).pathname;
      const chapter = isChapter(path) && done.has(nameOf(path));
      link.classList.toggle("chapter-read", chapter);
      if (chapter) link.title = "You have read this to its end";
      else link.removeAttribute("title");
    }
    again.hidden = KEPT.every((key) => localStorage.getItem(key) === null);
  }

  const again = Object.assign(document.createElement("button"), { type: "button", className: "start-again", textContent: "Start again: forget what I read and predicted" });
  again.addEventListener("click", () => {
    for (const key of KEPT) localStorage.removeItem(key);
    scrollTo(0, 0); // a reload that stays at the end would count as read again
    location.reload();
  });
  sidebar.append(again);

  const last = isChapter(location.pathname) && document.querySelector(".prev-next-area, .prev-next-footer");
  if (last) {
    new IntersectionObserver((seen, watcher) => {
      if (!seen.some((one) => one.isIntersecting)) return;
      watcher.disconnect();
      try {
        localStorage.setItem(READ, JSON.stringify([...new Set([...read(), nameOf(location.pathname)])]));
        tick();
      } catch {
        // a browser that keeps nothing shows no ticks
      }
    }).observe(last);
  }
  try {
    tick();
  } catch {
    again.hidden = true;
  }
})();
