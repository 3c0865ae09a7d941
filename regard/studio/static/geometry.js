// Geometry: one key moves, and the output slides along the line between its value and the others'.

import { attention, movedKey, normal, parse, random } from "/core.js";
import { button, card, chart, el, figure, lead, live, select, slider, svg, text } from "/ui.js";

const DEFAULTS = { q: "1 0.6", keys: "1.2 0.3; -0.4 1.1; -1 -0.7; 0.5 -1.2", values: "1.6 0.4; -0.3 1.5; -1.4 -0.5; 0.6 -1.4", j: 0, mx: 0.55, my: 0.95, beta: 0.7071, noise: 0, seed: 1 };
const REACH = 2.4;
const SIZE = 400;
const place = (x) => SIZE / 2 + (x / REACH) * (SIZE / 2);
const at = ([x, y]) => [place(x), place(-y)];

export function show(root) {
  live(root, "geometry", DEFAULTS, draw);

  function draw(state, set) {
    let query, keys, values;
    const wrong = {};
    const two = (name) => {
      try {
        const a = parse(state[name]);
        if (a[0].length !== 2) throw new Error("every vector has two numbers here");
        return a;
      } catch (error) { wrong[name] = error.message; return parse(DEFAULTS[name]); }
    };
    [[query], keys, values] = [two("q"), two("keys"), two("values")];
    if (keys.length !== values.length) { wrong.values = `there are ${keys.length} keys and ${values.length} values`; [keys, values] = [parse(DEFAULTS.keys), parse(DEFAULTS.values)]; }
    const j = Math.min(Math.max(0, state.j), keys.length - 1);
    const move = [state.mx, state.my];
    const result = movedKey(query, keys, values, j, move, state.beta);
    const [exact] = result.after.output;
    const cloud = shakenOutputs(query, keys, values, j, move, state);
    const gap = Math.hypot(exact[0] - result.linear[0], exact[1] - result.linear[1]);
    const stretch = Math.hypot(keys[j][0] + state.mx, keys[j][1] + state.my) / (Math.hypot(...keys[j]) || 1);
    const f = (x) => figure(x, 3);
    const pair = (v) => `(${f(v[0])}, ${f(v[1])})`;
    return [
      lead("Geometry", "Drag a key. Its weight changes, and the output slides along one line: from the mean of the other values to this key's own."),
      el("div", { class: "columns" },
        card("Queries and keys", keyPlane(query, keys, j, move, set), el("p", { class: "soft" }, "Drag a key, or focus it and press the arrow keys. The ring is where it was.")),
        card("Values and output", valuePlane(values, result, j, exact, cloud), legend())),
      el("div", { class: "columns" },
        card("Move it", el("div", { class: "controls" },
          select("j", "Key", String(j), keys.map((_, n) => [String(n), `k${n + 1}`]), (value) => set({ j: Number(value), mx: 0, my: 0 })),
          button("Back to where it was", () => set({ mx: 0, my: 0, noise: 0 }))),
          slider("stretch", "Stretch it: length beside what it was", stretch, { min: 0, max: 3, step: 0.01, shown: `${f(stretch)} ×`, onset: (x) => set({ mx: keys[j][0] * (x - 1), my: keys[j][1] * (x - 1) }) }),
          slider("noise", "Shake it with noise of deviation σ", state.noise, { min: 0, max: 2, step: 0.02, onset: (noise) => set({ noise }) }),
          slider("beta", "β", state.beta, { min: 0, max: 6, step: 0.01, onset: (beta) => set({ beta }), marks: [[Math.SQRT1_2, "1/√2"]] }),
          state.noise ? button("Shake again", () => set({ seed: state.seed + 1 })) : null),
        card("In numbers", el("dl", { class: "facts" },
          fact("δ = move · q", f(result.delta), "delta"),
          fact(`weight of k${j + 1} before`, f(result.before.weights[0][j])),
          fact("after, exactly", f(result.after.weights[0][j]), "weight"),
          fact("after, by a e^βδ / (1 + a (e^βδ − 1))", f(result.weight), "formula"),
          fact("after, by the derivative", f(result.linearWeight)),
          fact("output before", pair(result.before.output[0])),
          fact("output, exactly", pair(exact), "exact"),
          fact("output, linear prediction", pair(result.linear), "linear"),
          fact("the prediction is off by", f(gap), "gap"),
          fact("distance from the line", figure(offLine(exact, result.others, values[j]), 3), "line"),
          state.noise ? fact("farthest of 200 shaken outputs from the line", figure(Math.max(...cloud.map((point) => offLine(point, result.others, values[j]))), 3), "cloud") : null))),
      card("The weight, as the key moves along the query", weightChart(result, j)),
      card("Vectors", el("div", { class: "columns" }, [["q", "Query"], ["keys", "Keys"], ["values", "Values"]].map(([name, label]) => text(name, label, state[name], (value) => set({ [name]: value }), { rows: 2, invalid: wrong[name] })))),
    ];
  }

  function keyPlane(query, keys, j, move, set) {
    const [ox, oy] = at([0, 0]);
    return plane("Query and keys", arrow(query, "query"), label(query, "q"), keys.map((key, n) => {
      const now = n === j ? [key[0] + move[0], key[1] + move[1]] : key;
      const [x, y] = at(now);
      const to = (point) => set({ j: n, mx: clip(point[0]) - key[0], my: clip(point[1]) - key[1] });
      return [
        n === j && (move[0] || move[1]) ? svg("circle", { cx: at(key)[0], cy: at(key)[1], r: 9, fill: "none", stroke: `var(--c${n % 6})`, class: "ghost" }) : null,
        svg("line", { x1: ox, y1: oy, x2: x, y2: y, stroke: `var(--c${n % 6})`, class: "arrow" }),
        svg("circle", { cx: x, cy: y, r: n === j ? 10 : 8, fill: `var(--c${n % 6})`, class: "handle", tabindex: "0", role: "button", "data-key": `key-${n}`, "aria-label": `key ${n + 1} at ${figure(now[0], 2)}, ${figure(now[1], 2)}; arrow keys move it`,
          onkeydown: (event) => {
            const by = { ArrowLeft: [-0.05, 0], ArrowRight: [0.05, 0], ArrowUp: [0, 0.05], ArrowDown: [0, -0.05] }[event.key];
            if (!by) return;
            event.preventDefault();
            to([now[0] + by[0], now[1] + by[1]]);
          },
          onpointerdown: (event) => { event.preventDefault(); event.currentTarget.setPointerCapture(event.pointerId); },
          onpointermove: ({ currentTarget, pointerId, clientX, clientY }) => {
            if (!currentTarget.hasPointerCapture(pointerId)) return;
            const box = currentTarget.ownerSVGElement.getBoundingClientRect();
            to([((clientX - box.left) / box.width - 0.5) * 2 * REACH, -((clientY - box.top) / box.height - 0.5) * 2 * REACH]);
          } }),
        label(now, `k${n + 1}`),
      ];
    }));
  }

  function valuePlane(values, result, j, exact, cloud) {
    const drawing = plane("Values and output");
    const [from, to] = [at(result.others), at(values[j])];
    drawing.append(svg("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1], class: "line", "stroke-width": 1.6 }));
    for (const point of cloud) drawing.append(svg("circle", { cx: at(point)[0], cy: at(point)[1], r: 2.2, fill: "var(--c1)", opacity: 0.5 }));
    values.forEach((value, n) => drawing.append(svg("rect", { x: at(value)[0] - 6, y: at(value)[1] - 6, width: 12, height: 12, rx: 2, fill: `var(--c${n % 6})`, opacity: n === j ? 1 : 0.65 }), label(value, `v${n + 1}`)));
    drawing.append(svg("circle", { cx: from[0], cy: from[1], r: 4, fill: "var(--soft)" }), label(result.others, "others"));
    const [bx, by] = at(result.before.output[0]);
    drawing.append(svg("circle", { cx: bx, cy: by, r: 7, fill: "none", stroke: "var(--ink)", class: "ghost" }));
    const [lx, ly] = at(result.linear);
    drawing.append(svg("path", { d: `M${lx - 6} ${ly - 6}L${lx + 6} ${ly + 6}M${lx - 6} ${ly + 6}L${lx + 6} ${ly - 6}`, stroke: "var(--c2)", "stroke-width": 2.5 }));
    const [x, y] = at(exact);
    drawing.append(svg("circle", { cx: x, cy: y, r: 6, fill: "var(--ink)" }));
    return drawing;
  }

  function weightChart(result, j) {
    const a = result.before.weights[0][j];
    const deltas = Array.from({ length: 81 }, (_, n) => (n - 40) / 8);
    const grow = (delta) => Math.exp(result.before.beta * delta);
    return chart("", [
      { name: "exact", x: deltas, y: deltas.map((delta) => (a * grow(delta)) / (1 + a * (grow(delta) - 1))) },
      { name: "linear prediction", x: deltas, y: deltas.map((delta) => a + result.before.beta * delta * a * (1 - a)), colour: 2 },
    ], { x: "δ", y: `weight of k${j + 1}`, low: -0.05, high: 1.05, marks: [{ x: result.delta, name: "now" }], height: 260 });
  }
}

function shakenOutputs(query, keys, values, j, move, state) {
  if (!state.noise) return [];
  const next = random(state.seed);
  return Array.from({ length: 200 }, () => {
    const movedKeys = keys.map((key, n) => (n === j ? key.map((x, i) => x + move[i] + state.noise * normal(next)) : key));
    return attention([query], movedKeys, values, { beta: state.beta }).output[0];
  });
}

/** How far a point lies from the line through two others. */
function offLine(point, a, b) {
  const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
  return Math.abs(dx * (point[1] - a[1]) - dy * (point[0] - a[0])) / (Math.hypot(dx, dy) || 1);
}

/** A plane with a grid, and its drawing. */
function plane(name, ...children) {
  const rules = [-2, -1, 0, 1, 2].map((n) => [svg("line", { x1: place(n), x2: place(n), y1: 0, y2: SIZE, class: "rule" }), svg("line", { y1: place(n), y2: place(n), x1: 0, x2: SIZE, class: "rule" })]);
  return svg("svg", { class: "plane", viewBox: `0 0 ${SIZE} ${SIZE}`, role: "group", "aria-label": name }, rules, children);
}

function arrow(to, kind) {
  const [x, y] = at(to);
  const [ox, oy] = at([0, 0]);
  const turn = Math.atan2(y - oy, x - ox);
  const wing = (side) => `${x - 11 * Math.cos(turn + side)} ${y - 11 * Math.sin(turn + side)}`;
  return svg("path", { d: `M${ox} ${oy}L${x} ${y}M${wing(0.45)}L${x} ${y}L${wing(-0.45)}`, class: `arrow ${kind}`, fill: "none" });
}

function label(point, name) {
  const [x, y] = at(point);
  return svg("text", { x: Math.min(SIZE - 44, x + 11), y: Math.max(14, y - 9) }, name);
}

function legend() {
  const key = (drawn, name) => el("li", {}, svg("svg", { width: 18, height: 14, viewBox: "0 0 18 14", "aria-hidden": "true" }, drawn), " ", name);
  return el("ul", { class: "legend" },
    key(svg("circle", { cx: 9, cy: 7, r: 5, fill: "var(--ink)" }), "output, exactly"),
    key(svg("path", { d: "M4 2L14 12M4 12L14 2", stroke: "var(--c2)", "stroke-width": 2.5 }), "linear prediction"),
    key(svg("circle", { cx: 9, cy: 7, r: 5, fill: "none", stroke: "var(--ink)", opacity: 0.5 }), "output before"),
    key(svg("line", { x1: 1, x2: 17, y1: 7, y2: 7, stroke: "var(--accent)", "stroke-width": 2, "stroke-dasharray": "4 3" }), "its line"));
}

function fact(name, value, id) {
  return [el("dt", {}, name), el("dd", { "data-fact": id }, value)];
}

function clip(x) {
  return Math.max(-REACH, Math.min(REACH, x));
}
