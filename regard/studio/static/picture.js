// Shared by Vision and Read: a picture that is chosen, drawn or opened, and a model's view.

import { button, card, el, figure, lead, live, problem, toggle } from "/ui.js";
import { effects, mount, overlay } from "/view.js";
import { asker, changeSummary, changes, chooser, headTools, addressState, list, nothingYet, runsFor, viewState, unlist } from "/models.js";

const DEFAULTS = { run: "", sample: 0, drawn: "", off: "", beta: "", hidden: "", hiding: false, map: "", layer: "", head: "", row: "", merge: "tokens", label: "written", order: "" };
const NONE = { off: "", beta: "", hidden: "" };

export async function showPictures(root, ask, pageName, { title, about, question, kind, result }) {
  const { ready, command } = await runsFor(ask, pageName);
  if (!ready.length) return void root.replaceChildren(...nothingYet(title, about, command));
  let samples = [];
  let opened = null;
  let view = null;
  let whole = null;
  let trouble = null;
  let busy = true;
  const board = { width: 0, height: 0, cells: [], brush: null, focused: false };
  const page = live(root, pageName, DEFAULTS, draw, (state) => { state.run ||= ready[0].name; });

  const request = asker(ask, question, (answer, error, sent) => {
    busy = false;
    trouble = error;
    if (answer) {
      view = answer;
      if (board.width !== answer.picture.width || board.height !== answer.picture.height) resize(answer.picture);
      if (!sent.off.length && !sent.beta.length && !sent.hidden.length) whole = answer;
    }
    page.render();
  });

  function image(state) {
    if (opened) return opened;
    if (state.drawn && board.width) return png();
    return samples[state.sample] ?? samples[0];
  }

  function again(state, wait = 0, effect = false) {
    const data = image(state);
    if (!data) return;
    busy = true;
    request({ run: state.run, image: data, ...changes(state), effect }, wait);
  }

  function change(delta, wait = 0) {
    const next = { ...page.state, ...delta };
    page.set(delta);
    again(next, wait);
  }

  try {
    samples = await ask("samples", { kind });
    again({ ...page.state, drawn: "" });
    if (page.state.drawn) setTimeout(() => again(page.state), 400);
  } catch (error) { trouble = error; }
  page.render();

  function draw(state, set) {
    return [
      lead(title, about),
      el("div", { class: "columns" },
        card("The picture", chooser(ready, state, (delta) => change({ ...delta, ...NONE })),
          el("div", { class: "gallery", role: "group", "aria-label": "samples" }, samples.map((data, n) => el("button", { type: "button", "data-key": `sample-${n}`, "aria-pressed": String(!opened && !state.drawn && n === state.sample), "aria-label": `sample ${n + 1}`, onclick: () => { opened = null; change({ sample: n, drawn: "", ...NONE }); } }, el("img", { src: `data:image/png;base64,${data}`, height: 34, alt: "" })))),
          view ? drawing(state) : null,
          el("div", {}, el("label", { class: "file" }, "Or open a file:", el("input", { type: "file", accept: "image/*", onchange: open })))),
        card(result.title, trouble ? problem(trouble) : null, view ? [result.show(view, whole), changeSummary(state, change, NONE), toggle("hiding", "Clicking a patch hides it", state.hiding, (hiding) => set({ hiding })), state.hiding ? hider(state) : null] : trouble ? null : el("p", { class: "soft", "aria-busy": "true" }, "The model is being read …"))),
      view ? el("div", { class: busy ? "busy" : null }, viewer(state)) : null,
      view?.effect ? card("What hiding each patch does", el("p", { class: "soft" }, "By how much log p falls when nobody may attend to a patch. A weight says where a head looked; this says what it mattered."), overlay(view.picture, view.effect.falls.map((row) => Math.max(0, row.reduce((sum, x) => sum + x, 0))), { size: 420, label: "Fall of log p, patch by patch" }), effects(view.effect).querySelector(".bars")) : null,
      view?.positions ? similar(state) : null,
    ];
  }

  function hider(state) {
    const { picture } = view;
    const hidden = hiddenPatches(state);
    return [el("p", { class: "note" }, "Nobody may attend to a hidden patch, in any layer."),
      overlay(picture, new Array(picture.rows * picture.columns).fill(0), { size: 300, hidden, label: "Click a patch to hide it", onpick: (n) => {
        hidden.has(n) ? hidden.delete(n) : hidden.add(n);
        change({ hidden: unlist([...hidden].sort((a, b) => a - b).map((place) => [String(place + picture.first)])) });
      } })];
  }

  function hiddenPatches(state) {
    return new Set(list(state.hidden).map(([place]) => Number(place) - view.picture.first));
  }

  function viewer(state) {
    const box = el("div");
    mount(box, { ...view, effect: null }, {
      plain: true, hidden: hiddenPatches(state),
      state: viewState(state),
      onstate: (next) => page.set(addressState(next)),
      tools: (head) => headTools(head, state, change, view.effect ? [] : [button("Find what each patch and head does", () => { again(state, 0, true); page.render(); }, { "data-key": "effects" })]),
    });
    return box;
  }

  /** Cosine similarity of one patch's position with all others. */
  function similar(state) {
    const n = Math.min(Math.max(0, Number(state.row || view.picture.first) - view.picture.first), view.positions.length - 1);
    const row = view.positions[n].map((x) => Math.max(0, x));
    return card("How alike positions are", overlay(view.picture, row, { size: 220, selected: n, label: "Similarity of positions", onpick: (m) => page.set({ row: String(m + view.picture.first) }) }), el("p", { class: "soft" }, `Cosine of patch ${n + 1}'s position with each other's: ${view.positions[n].slice(0, 6).map((x) => figure(x, 2)).join(", ")}${view.positions.length > 6 ? " …" : ""}`));
  }

  // Drawing

  function resize(picture) {
    Object.assign(board, { width: picture.width, height: picture.height, cells: new Array(picture.width * picture.height).fill(0) });
    const digits = page.state.drawn;
    if (digits.length === board.cells.length) board.cells = [...digits].map((digit) => parseInt(digit, 16) / 15);
  }

  function png() {
    const canvas = el("canvas", { width: board.width, height: board.height });
    ink(canvas, false);
    return canvas.toDataURL("image/png").split(",")[1];
  }

  function ink(canvas, withBrush = board.focused) {
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(board.width, board.height);
    board.cells.forEach((x, n) => pixels.data.set([255 * x, 255 * x, 255 * x, 255], 4 * n));
    context.putImageData(pixels, 0, 0);
    if (!withBrush) return;
    const [x, y] = brush();
    context.fillStyle = "rgb(230 120 0 / 0.75)";
    context.fillRect(x, y, 1, 1);
  }

  function brush() {
    return board.brush ?? [board.width >> 1, board.height >> 1];
  }

  function drawing(state) {
    if (!board.width || board.width * board.height > 4096) return null;
    const scale = Math.max(4, Math.min(24, Math.floor(300 / board.width)));
    const paint = (x, y) => {
      for (let row = 0; row < board.height; row++) for (let column = 0; column < board.width; column++) {
        const far = Math.hypot(column + 0.5 - x, row + 0.5 - y);
        const n = row * board.width + column;
        board.cells[n] = Math.min(1, Math.max(board.cells[n], 1.35 - far));
      }
    };
    const dab = ({ currentTarget, clientX, clientY }) => {
      const box = currentTarget.getBoundingClientRect();
      paint(((clientX - box.left) / box.width) * board.width, ((clientY - box.top) / box.height) * board.height);
      ink(currentTarget);
    };
    const done = () => {
      opened = null;
      change({ drawn: board.cells.map((x) => Math.round(15 * Math.max(0, x)).toString(16)).join(""), ...NONE });
    };
    const focus = ({ currentTarget, type }) => {
      board.focused = type === "focus" && currentTarget.matches(":focus-visible"); // by keyboard
      ink(currentTarget);
    };
    const canvas = el("canvas", { class: "draw pixels", width: board.width, height: board.height, "data-key": "draw", tabindex: 0, role: "application", "aria-label": "Draw here. By keyboard: arrows move the brush, with Shift they draw, Space makes a dot, Enter is done.", style: { width: `${board.width * scale}px` },
      onpointerdown: (event) => { event.currentTarget.setPointerCapture(event.pointerId); dab(event); },
      onpointermove: (event) => event.currentTarget.hasPointerCapture(event.pointerId) && dab(event),
      onlostpointercapture: done,
      onkeydown: (event) => handleKey(event, paint, done),
      onfocus: focus,
      onblur: focus });
    ink(canvas);
    return el("div", {}, el("p", { class: "note" }, "Or draw one:"), canvas, el("p", {}, button("Clear", () => { board.cells.fill(0); page.set({ drawn: "" }); page.render(); }, { class: "mini" })));
  }

  /** Drawing by keyboard: the brush is a pixel that arrows move. */
  function handleKey(event, paint, done) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Enter") return done();
    if (!move && event.key !== " ") return;
    event.preventDefault();
    const [dx, dy] = move || [0, 0];
    const [x, y] = brush();
    board.brush = [Math.min(board.width - 1, Math.max(0, x + dx)), Math.min(board.height - 1, Math.max(0, y + dy))];
    if (event.shiftKey || !move) paint(board.brush[0] + 0.5, board.brush[1] + 0.5);
    board.focused = true;
    ink(event.currentTarget);
  }

  async function open(event) {
    const [file] = event.target.files;
    if (!file) return;
    if (file.size > 2e6) { trouble = new Error("a picture may have at most 2 MB"); return page.render(); }
    const bytes = new Uint8Array(await file.arrayBuffer());
    let text = "";
    for (const byte of bytes) text += String.fromCharCode(byte);
    opened = btoa(text);
    change({ drawn: "", ...NONE });
  }
}

