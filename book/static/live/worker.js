// Python beside the page: loads Pyodide and the package's standard-library modules once, then answers.
let live;

async function start(root) {
  importScripts(`${root}pyodide/pyodide.js`);
  const [pyodide, modules] = await Promise.all([
    loadPyodide({ indexURL: `${root}pyodide/` }),
    fetch(`${root}live/zero_ref.zip`).then((response) => {
      if (!response.ok) throw new Error(`${response.url}: ${response.status}`);
      return response.arrayBuffer();
    }),
  ]);
  pyodide.unpackArchive(modules, "zip");
  return pyodide.pyimport("zero_ref.live");
}

onmessage = async ({ data: { id, root, name, values, width, cell } }) => {
  try {
    live ??= start(root).catch((error) => {
      live = undefined; // asked again, it tries again
      throw error;
    });
    const python = await live;
    let text;
    if (cell) text = python.run_cell(JSON.stringify(cell.before), cell.source);
    else if (values === undefined) text = python.controls(name);
    else text = python.answer(name, JSON.stringify(values), width);
    postMessage({ id, result: JSON.parse(text) });
  } catch (error) {
    postMessage({ id, error: String(error.message ?? error) });
  }
};
