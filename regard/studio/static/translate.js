// Translate: the attention of a translator, with controls that act on the model and decode again.

import { button, card, el, figure, lead, live, problem, select, svg, text } from "/ui.js";
import { byWords, effects, fold, mount, selection, sign, tokens, unpack, wordNames } from "/view.js";
import { asker, byHand, changeSummary, changes, chooser, headTools, hiding, addressState, list, nothingYet, runsFor, viewState, unlist } from "/models.js";

const DEFAULTS = { run: "", text: "", beams: 4, off: "", beta: "", hidden: "", forced: "", map: "", layer: "", head: "", row: "", merge: "tokens", label: "written", order: "" };
const NONE = { off: "", beta: "", hidden: "", forced: "" };
const DATES = ["4. März 1983", "23 октября 2006 г.", "10 ธันวาคม ค.ศ. 1974", "1990年10月3日", "Friday, August 9, 2024"];
const ABOUT = "Type a source. Switch heads off, sharpen them, hide words or force one: the model decodes again each time.";

export async function show(root, ask) {
  const { ready, command } = await runsFor(ask, "translate");
  if (!ready.length) return void root.replaceChildren(...nothingYet("Translate", ABOUT, command));
  let view = null;
  let plain = null;
  let trouble = null;
  let busy = true;
  const page = live(root, "translate", DEFAULTS, draw, (state) => {
    state.run ||= ready[0].name;
    state.text ||= readsDates(state.run) ? DATES[0] : "A dog runs on the beach.";
  });

  const request = asker(ask, "translate", (answer, error) => {
    busy = false;
    trouble = error;
    if (answer) {
      view = answer;
      if (!edited(page.state)) plain = { text: answer.text, logP: answer.logP, key: key(page.state) };
      const { best } = answer;
      if (best && answer.effect && page.state.head === "") Object.assign(page.state, { map: "cross", layer: String(best.layer), head: String(best.head) });
    }
    page.render();
  });
  const compare = asker(ask, "translate", (answer, error, question) => {
    if (answer) plain = { text: answer.text, logP: answer.logP, key: key(question) };
    page.render();
  });

  /** True for a run of dates. */
  function readsDates(name) {
    return /date/.test(name) || ready.some((run) => run.name === name && run.task === "dates");
  }

  const key = (state) => JSON.stringify([state.run, state.text, state.beams]);
  const edited = (state) => Boolean(state.off || state.beta || state.hidden || state.forced);
  const question = (state) => ({ run: state.run, text: state.text, beams: state.beams, ...changes(state) });

  function again(state, wait = 0, effect = false) {
    if (!state.text.trim()) return;
    busy = true;
    request({ ...question(state), effect }, wait);
    if (edited(state) && plain?.key !== key(state)) compare({ run: state.run, text: state.text, beams: state.beams }, wait);
  }

  function change(delta, wait = 0) {
    const next = { ...page.state, ...delta };
    page.set(delta);
    again(next, wait);
  }

  again(page.state);

  function draw(state) {
    return [
      lead("Translate", ABOUT),
      card(null,
        el("div", { class: "columns" },
          text("text", "Source", state.text, (value) => change({ text: value, ...NONE, row: "" }, 250)),
          el("div", { class: "controls" }, chooser(ready, state, (delta) => change({ ...delta, ...NONE, map: "", layer: "", head: "", row: "" })), select("beams", "Beam size", String(state.beams), ["1", "2", "4", "8"].map((n) => [n, n === "1" ? "1, greedy" : n]), (beams) => change({ beams: Number(beams) })))),
        readsDates(state.run) ? el("p", { class: "words" }, DATES.map((date) => button(date, () => change({ text: date, ...NONE, row: "" }), { class: "mini" }))) : null,
        trouble ? problem(trouble) : null,
        view ? outcome(state) : trouble ? null : el("p", { class: "soft", "aria-busy": "true" }, "The model is being read …")),
      ...(view ? results(state) : []),
    ];
  }

  function results(state) {
    return [
      el("div", { class: busy ? "busy" : null }, viewer(state)),
      view.maps.some((item) => item.overview) ? null : card("Word alignment", alignment(state)),
      view.effect ? effects(view.effect) : null,
      view.tree.length ? card("Beam tree", el("p", { class: "soft" }, "Every hypothesis that was open, step by step; in colour the one that won. A number is the log p of all so far."), tree()) : null,
      view.hypotheses.length > 1 ? card("The best few", el("p", { class: "soft" }, "What the search ended with, and its score: log p by length. Look at one to see the attention with which it is written."), nBest(state)) : null,
    ];
  }

  function outcome(state) {
    const cross = view.maps.find((item) => item.name === "cross");
    return [
      cross.overview ? null : el("p", { class: "note" }, "Click a part of the source to hide it from all attention."),
      cross.overview ? null : hiding(cross, state, (delta) => change({ ...delta, forced: "" })),
      el("p", { class: "answer", "data-fact": "output", "aria-live": "polite" }, view.text || "∅"),
      plain && edited(state) ? el("p", { class: "before" }, plain.text === view.text ? "Unchanged" : `Without changes: ${plain.text}`, `; log p ${figure(view.logP, 2)}, without changes ${figure(plain.logP, 2)} for its own.`) : el("p", { class: "before" }, `log p ${figure(view.logP, 2)}`),
      forcing(state),
      changeSummary(state, change, NONE),
    ];
  }

  /** The output tokens; each can be replaced by an alternative, and the rest is decoded again. */
  function forcing(state) {
    const forced = list(state.forced).length;
    return el("details", { "data-key": "forcing", open: forced > 0 },
      el("summary", {}, "Tokens, and what might have been written instead"),
      tokens(view.tokens),
      el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "alternatives" }, el("table", {}, el("tbody", {}, view.tokens.map(([piece], n) => el("tr", {}, el("th", { scope: "row" }, n < forced ? "▸ " : "", sign(piece)),
        el("td", { class: "words" }, view.alternatives[n].map(([token, name, p]) => button([sign(name), " ", el("small", {}, figure(p, 2))], () => change({ forced: unlist([...view.ids.slice(0, n), token].map((id) => [String(id)])) }), { class: "mini", "data-key": `force-${n}-${token}`, title: "begin so, and go on from here" })))))))));
  }

  function viewer(state) {
    const box = el("div");
    mount(box, { ...view, effect: null }, {
      plain: true,
      state: viewState(state),
      onstate: (next) => page.set(addressState(next)),
      tools: (chosen) => headTools(chosen, state, change,
        [view.effect ? null : button("Find what each head and word does", () => { again(state, 0, true); page.render(); }, { "data-key": "effects" })],
        [button("Open this head in By hand", () => { location.hash = byHand(chosen, state); }, { "data-key": "to-byhand" })]),
    });
    return box;
  }

  function alignment(state) {
    const cross = view.maps.find((item) => item.name === "cross");
    const { layer, head } = view.best ?? selection(view, { map: "cross", layer: state.layer || undefined, head: state.head || undefined });
    const shift = view.best?.shift ?? 0;
    const all = typeof head === "number" ? unpack(cross)(layer, head) : selection(view, { map: "cross" }).weights;
    const rows = shift ? [...all.slice(1), all.at(-1)] : all;
    const merged = cross.columnWords && new Set(cross.rowWords).size > 2;
    const weights = merged ? byWords(rows, cross.rowWords, cross.columnWords) : rows;
    const sources = merged ? wordNames(cross.columns, cross.columnWords) : cross.columns.map(sign);
    const targets = merged ? wordNames(cross.written, cross.rowWords) : cross.written.map(sign);
    return [lines(weights, sources, targets), el("p", { class: "soft" }, view.best ? `From head ${head + 1} of layer ${layer + 1}, which aligns best: found by leaving words out.` : "From the head that is chosen above; “Find what each head and word does” finds the one that aligns best.")];
  }

  function lines(weights, sources, targets) {
    const width = (name) => 22 + 9 * [...name].reduce((sum, letter) => sum + (letter.codePointAt(0) > 0x1100 ? 1.7 : 1), 0);
    const row = (names) => { let x = 8; return names.map((name) => { const middle = x + width(name) / 2; x += width(name); return middle; }); };
    const [top, bottom] = [row(sources), row(targets)];
    const wide = Math.max(top.at(-1) ?? 0, bottom.at(-1) ?? 0) + 40;
    const picture = svg("svg", { viewBox: `0 0 ${wide} 150`, width: wide, height: 150, role: "img", "aria-label": `Alignment: ${targets.map((name, i) => `${name} from ${sources[weights[i].indexOf(Math.max(...weights[i]))]}`).join(", ")}` });
    weights.forEach((line, i) => line.forEach((x, j) => { if (x > 0.08) picture.append(svg("path", { d: `M${top[j]} 30C${top[j]} 80 ${bottom[i]} 70 ${bottom[i]} 118`, fill: "none", stroke: "var(--heat)", "stroke-width": (0.6 + 4 * x).toFixed(2), opacity: Math.min(1, 0.15 + x).toFixed(2) }, svg("title", {}, `${targets[i]} ← ${sources[j]}: ${figure(x, 3)}`))); }));
    sources.forEach((name, j) => picture.append(svg("text", { x: top[j], y: 22, "text-anchor": "middle", "font-size": 15 }, name)));
    targets.forEach((name, i) => picture.append(svg("text", { x: bottom[i], y: 136, "text-anchor": "middle", "font-size": 15 }, name)));
    return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "word alignment" }, picture);
  }

  function nBest(state) {
    return el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, view.hypotheses.map((item, n) => el("tr", {}, el("td", { class: "n" }, `${n + 1}`), el("th", { scope: "row" }, item.text || "∅"), el("td", { class: "n" }, figure(item.score, 3)),
      el("td", {}, n || state.forced ? button("Look at it", () => change({ forced: unlist(item.ids.map((id) => [String(id)])) }), { class: "mini", "data-key": `hypothesis-${n}` }) : "shown"))))));
  }

  function tree() {
    const nodes = view.tree.map(([step, parent, token, name, gain, total]) => ({ step, parent, token, name, gain, total }));
    const won = new Set();
    const path = view.ids.slice(list(page.state.forced).length);
    let at = -1;
    path.forEach((token, step) => {
      at = nodes.findIndex((node, n) => node.step === step && node.token === token && (node.parent ?? -1) === at && !won.has(n));
      if (at >= 0) won.add(at);
    });
    const steps = Math.max(...nodes.map((node) => node.step)) + 1;
    const ranks = new Map();
    nodes.forEach((node, n) => { const rank = ranks.get(node.step) ?? 0; ranks.set(node.step, rank + 1); node.rank = rank; node.n = n; });
    const most = Math.max(...ranks.values());
    const [dx, dy] = [92, 34];
    const x = (node) => 20 + node.step * dx;
    const y = (node) => 24 + node.rank * dy;
    const picture = svg("svg", { width: steps * dx + 60, height: most * dy + 20, viewBox: `0 0 ${steps * dx + 60} ${most * dy + 20}`, role: "img", "aria-label": `Beam tree of ${steps} steps; the best: ${view.text}` });
    for (const node of nodes) {
      if (node.parent !== null) {
        const from = nodes[node.parent];
        picture.append(svg("path", { d: `M${x(from) + 44} ${y(from) - 4}C${x(from) + 66} ${y(from) - 4} ${x(node) - 22} ${y(node) - 4} ${x(node) - 4} ${y(node) - 4}`, class: won.has(node.n) ? "won" : null }));
      }
      picture.append(svg("g", { class: won.has(node.n) ? "won" : null }, svg("text", { x: x(node), y: y(node) }, `\u2068${sign(node.name)}\u2069 `, svg("tspan", { class: "tick" }, figure(node.total, 1))), svg("title", {}, `${sign(node.name)}: p = ${figure(Math.exp(node.gain), 3)}`)));
    }
    return [el("div", { class: "tree", tabindex: "0", role: "group", "aria-label": "Beam tree" }, picture), treeTable(nodes)];
  }

  /** The beam tree as a table: step, hypothesis, token and probabilities of each open hypothesis. */
  function treeTable(nodes) {
    const written = (node) => (node.parent === null ? "" : written(nodes[node.parent])) + node.name.replaceAll("▁", " ");
    return fold("The same as a table", () => el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Beam tree as a table" }, el("table", {},
      el("thead", {}, el("tr", {}, ["step", "hypothesis", "token", "p", "log p of all"].map((name, n) => el("th", { scope: "col", class: n === 1 || n === 2 ? null : "n" }, name)))),
      el("tbody", {}, nodes.map((node) => el("tr", {}, el("td", { class: "n" }, String(node.step + 1)), el("th", { scope: "row" }, written(node).trim()), el("td", {}, sign(node.name)), el("td", { class: "n" }, figure(Math.exp(node.gain), 3)), el("td", { class: "n" }, figure(node.total, 2))))))));
  }
}
