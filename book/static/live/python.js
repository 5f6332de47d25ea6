// One Python for all that a page runs: zeroPython.ask puts a question to the worker (worker.js), which fetches Python
// from this site when it is first asked.
window.zeroPython = (() => {
  const root = new URL("../", document.currentScript.src).href;
  const COST = "fetches Python, 12 MB, once, from this site";
  const FROM_A_DISK =
    "a browser starts Python only on pages from a server. In the book's folder run python -m http.server, and open http://localhost:8000";

  let worker;
  let asked = 0;
  const waiting = new Map();

  function start() {
    worker = new Worker(`${root}live/worker.js`);
    worker.onmessage = ({ data: { id, result, error } }) => {
      const one = waiting.get(id);
      waiting.delete(id);
      if (error === undefined) one?.resolve(result);
      else one?.reject(new Error(error));
    };
    worker.onerror = (event) => {
      for (const { reject } of waiting.values()) reject(new Error(event.message || "the worker did not start"));
      waiting.clear();
      worker = undefined;
    };
  }

  // Gives a promise of the answer, with the question's number as its property `id`.
  function ask(question) {
    if (location.protocol === "file:") return Promise.reject(new Error(FROM_A_DISK));
    if (!worker) start();
    const id = ++asked;
    const answer = new Promise((resolve, reject) => waiting.set(id, { question, resolve, reject }));
    worker.postMessage({ id, root, ...question });
    return Object.assign(answer, { id });
  }

  // A worker that computes cannot hear: it ends, and another one answers whatever else was asked.
  function stop(id, why) {
    if (!waiting.has(id)) return;
    worker.terminate();
    waiting.get(id).reject(new Error(why));
    waiting.delete(id);
    worker = undefined;
    if (waiting.size) start();
    for (const [other, { question }] of waiting) worker.postMessage({ id: other, root, ...question });
  }

  return { ask, stop, COST };
})();
