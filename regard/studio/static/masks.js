// Masks and map: a model's boxes with their shapes and parameters, and a composer of masks.

import { card, el, lead, live, problem, select, slider, toggle } from "/ui.js";
import { asker } from "/models.js";

const DEFAULTS = { model: "base", box: "", queries: 8, keys: 8, a: "causal", na: 2, nota: false, join: "and", b: "none", nb: 6, notb: false, drawn: "" };
const NAMES = { none: "nothing", causal: "causal()", window: "window(n)", padding: "padding([n])", prefix: "prefix(n)", documents: "documents", drawn: "drawn by hand" };
const ABOUT = {
  self: "Every position attends to every position of the same sequence. Queries, keys and values are all made of it.",
  masked: "Every position attends to itself and to those before it: a mask hides what is still to be written.",
  cross: "Queries come from the decoder, keys and values from the encoder's output. This is where the target looks at the source.",
  "feed-forward": "Two linear layers with an activation between them, at each position by itself.",
  norm: "What the sublayer computed is added to what went in, and normalized.",
  embedding: "Each token or patch becomes a vector; its position is added.",
  output: "A linear layer: logits for every token of the vocabulary, or for every class.",
};

export function show(root, ask) {
  let map = null;
  let runs = [];
  let mask = null;
  let trouble = null; // of the mask
  let mapTrouble = null;
  const page = live(root, "masks", DEFAULTS, draw);

  const requestMap = asker(ask, "architecture", (answer, error) => {
    [map, mapTrouble] = [answer ?? map, error];
    page.render();
  });
  const requestMask = asker(ask, "mask", (answer, error) => {
    [mask, trouble] = [answer ?? mask, error];
    page.render();
  });
  requestMap({ model: page.state.model });
  requestMask(question(page.state));
  ask("runs").then((answer) => { runs = answer.runs.filter((run) => run.ready); page.render(); }).catch(() => {});

  function draw(state, set) {
    const change = (changes) => { set(changes); requestMask(question({ ...state, ...changes })); };
    return [
      lead("Masks and map", "Where attention stands in a model, and what it may look at."),
      card("The architecture", select("model", "Model", state.model, [["base", "Transformer base"], ["big", "Transformer big"], ["tiny", "tiny"], ["vit-b/16", "ViT-B/16"], ...runs.map((run) => [run.name, run.name])], (model) => { set({ model, box: "" }); requestMap({ model }); }),
        mapTrouble ? problem(mapTrouble) : null,
        map ? [drawing(state, set), details(state)] : mapTrouble ? null : el("p", { class: "soft", "aria-busy": "true" }, "Counting …")),
      composer(state, change),
    ];
  }

  function drawing(state, set) {
    const sides = ["encoder", "decoder"].filter((side) => map.boxes.some((box) => box.side === side));
    const boxed = (box) => {
      const id = String(map.boxes.indexOf(box));
      return el("button", { type: "button", class: `box ${box.kind}`, "data-key": `box-${id}`, "aria-pressed": String(state.box === id), onclick: () => set({ box: state.box === id ? "" : id }) }, box.title, el("small", {}, count(box.parameters)));
    };
    return el("div", { class: "map" }, sides.map((side) => {
      const mine = map.boxes.filter((box) => box.side === side);
      const first = mine.findIndex((box) => box.times > 1 || box.kind === "norm");
      const last = mine.findLastIndex((box) => box.times > 1 || box.kind === "norm");
      return el("div", {}, el("h3", {}, side === "encoder" ? "Encoder" : "Decoder"), el("div", { class: "stack" },
        mine.slice(0, first).map(boxed),
        el("div", { class: "block" }, el("span", { class: "times" }, `× ${mine[first].times}`), mine.slice(first, last + 1).map(boxed)),
        mine.slice(last + 1).map(boxed)));
    }));
  }

  function details(state) {
    const box = map.boxes[Number(state.box)];
    const total = el("p", { class: "soft" }, `${count(map.parameters)} parameters in all, width ${map.width}, ${map.heads} heads. From below to above; the dashed box is masked, the bold one crosses over. Click a box.`);
    if (state.box === "" || !box) return total;
    return [total, el("div", { class: "columns" },
      el("dl", { class: "facts" }, el("dt", {}, "box"), el("dd", {}, `${box.title}${box.times > 1 ? `, in each of ${box.times} layers` : ""}`), el("dt", {}, "gives"), el("dd", {}, box.shape), box.inside ? [el("dt", {}, "inside"), el("dd", {}, box.inside)] : null,
        el("dt", {}, "parameters"), el("dd", { "data-fact": "parameters" }, `${box.parameters.toLocaleString("en")}${box.times > 1 ? ` × ${box.times} = ${(box.parameters * box.times).toLocaleString("en")}` : ""}`), el("dt", {}, "what it does"), el("dd", {}, ABOUT[box.kind])),
      box.parts.length ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "parameter"), el("th", { scope: "col" }, "shape"), el("th", { scope: "col", class: "n" }, "numbers"))),
        el("tbody", {}, box.parts.map(([name, shape, numbers]) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, name)), el("td", {}, shape), el("td", { class: "n" }, numbers.toLocaleString("en"))))))) : el("p", { class: "soft" }, "It has no parameters of its own."))];
  }

  function composer(state, change) {
    const part = (letter, label) => el("div", { class: "controls" },
      select(letter, label, state[letter], Object.entries(NAMES).filter(([name]) => letter === "b" || name !== "none"), (value) => change({ [letter]: value })),
      ["window", "padding", "prefix"].includes(state[letter]) ? slider(`n${letter}`, "n", state[`n${letter}`], { min: 0, max: 16, step: 1, shown: String(state[`n${letter}`]), onset: (value) => change({ [`n${letter}`]: value }) }) : null,
      state[letter] === "none" ? null : toggle(`not${letter}`, "not (~)", state[`not${letter}`], (value) => change({ [`not${letter}`]: value })));
    return card("Compose a mask",
      el("div", { class: "columns" },
        el("div", {}, part("a", "Mask"), state.b !== "none" ? select("join", "joined by", state.join, [["and", "& and"], ["or", "| or"]], (join) => change({ join })) : null, part("b", "and another"),
          slider("queries", "Queries L", state.queries, { min: 1, max: 24, step: 1, shown: String(state.queries), onset: (queries) => change({ queries, drawn: "" }) }),
          slider("keys", "Keys S", state.keys, { min: 1, max: 24, step: 1, shown: String(state.keys), onset: (keys) => change({ keys, drawn: "" }) })),
        el("div", {}, trouble ? problem(trouble) : null, mask ? [grid(state, change), el("dl", { class: "facts" },
          el("dt", {}, "mask"), el("dd", {}, el("code", { "data-fact": "mask" }, mask.text)),
          el("dt", {}, "backend"), el("dd", { "data-fact": "backend" }, `${mask.backend}, ${mask.kernel}`),
          el("dt", {}, "because"), el("dd", { "data-fact": "reason" }, mask.reason),
          el("dt", {}, "pairs"), el("dd", {}, `${mask.allowed.flat().filter(Boolean).length} of ${mask.allowed.flat().length} may attend`))] : trouble ? null : el("p", { class: "soft", "aria-busy": "true" }, "One moment …"))),
      el("p", { class: "soft" }, "A row is a query, a column a key. With fewer queries than keys, the last query stands at the last key. Click cells to draw a mask of your own."));
  }

  function grid(state, change) {
    const a = mask.allowed;
    const flip = (i, j) => {
      a[i][j] = 1 - a[i][j]; // at once, so that a second click before the answer keeps the first
      change({ a: "drawn", b: "none", nota: false, drawn: a.map((row) => row.join("")).join(".") });
    };
    return el("div", { class: "maskgrid", role: "group", "aria-label": "which query may attend to which key", style: { gridTemplateColumns: `repeat(${a[0].length}, auto)` } },
      a.flatMap((row, i) => row.map((x, j) => el("button", { type: "button", "data-key": `cell-${i}-${j}`, "aria-pressed": String(Boolean(x)), "aria-label": `query ${i + 1}, key ${j + 1}`, onclick: () => flip(i, j), onkeydown: (event) => {
        const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (!by) return;
        event.preventDefault();
        root.querySelector(`[data-key="cell-${i + by[0]}-${j + by[1]}"]`)?.focus();
      } }))));
  }
}

function question(state) {
  const part = (letter) => {
    const [kind, n] = [state[letter], state[`n${letter}`]];
    let tree = [kind];
    if (kind === "none") return null;
    if (kind === "window" || kind === "prefix") tree = [kind, n];
    if (kind === "padding") tree = [kind, Math.min(n, state.keys)];
    if (kind === "documents") tree = [kind, Array.from({ length: state.keys }, (_, j) => Math.floor(j / 3))];
    if (kind === "drawn") {
      const rows = state.drawn.split(".");
      tree = [kind, Array.from({ length: state.queries }, (_, i) => Array.from({ length: state.keys }, (_, j) => Number((rows[i]?.[j] ?? "1") === "1")))];
    }
    return state[`not${letter}`] ? ["not", tree] : tree;
  };
  const [a, b] = [part("a"), part("b")];
  return { queries: state.queries, keys: state.keys, mask: b ? [state.join, a, b] : a };
}

function count(n) {
  if (n >= 1e6) return `${(n / 1e6).toFixed(n >= 1e8 ? 0 : 1)} M`;
  if (n >= 1e3) return `${(n / 1e3).toFixed(n >= 1e5 ? 0 : 1)} k`;
  return String(n);
}

