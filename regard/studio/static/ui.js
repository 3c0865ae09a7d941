// Shared by all pages: questions, state in the address, controls, tables, charts.

import { el, figure, fold, morph, svg } from "/view.js";

/**
 * Questions to the server for one visit of a page, which ends with the signal. A refusal is an Error with its reason.
 * After the visit no answer arrives: the promise stays pending.
 */
export function asking(signal) {
  return async (name, question = {}) => {
    let response, answer;
    try {
      response = await fetch(`/api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question), signal });
      answer = await response.json();
    } catch {
      if (!signal.aborted) throw new Error("the studio does not answer; is `regard studio` still running?");
    }
    if (signal.aborted) return new Promise(() => {});
    if (!response.ok) throw new Error(answer.error);
    return answer;
  };
}

/** A page's state: read from the address, and written back, so that a view can be shared. */
export function stateOf(defaults) {
  const parameters = new URLSearchParams(location.hash.split("?")[1] ?? "");
  const state = { ...defaults };
  for (const [key, value] of Object.entries(defaults)) {
    if (!parameters.has(key)) continue;
    const text = parameters.get(key);
    if (typeof value === "number") { if (text !== "" && Number.isFinite(Number(text))) state[key] = Number(text); }
    else if (typeof value === "boolean") state[key] = text === "1";
    else state[key] = text;
  }
  return state;
}

export function remember(page, state, defaults) {
  const parts = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (value === defaults[key] || value === undefined || !(key in defaults)) continue;
    parts.set(key, value === true ? "1" : value === false ? "0" : String(value));
  }
  const text = parts.toString();
  history.replaceState(null, "", `#${page}${text ? `?${text}` : ""}`);
}

/**
 * A page that is updated whenever its state changes, until it is left. `begin` sets what neither the address nor the
 * defaults contain: the run, for example.
 */
export function live(root, page, defaults, draw, begin = () => {}) {
  const state = stateOf(defaults);
  begin(state);
  let scheduled = false;
  const set = (changes) => {
    if (!root.isConnected) return;
    Object.assign(state, changes);
    remember(page, state, defaults);
    if (!scheduled) queueMicrotask(render);
    scheduled = true;
  };
  function render() {
    scheduled = false;
    numbered = 0;
    morph(root, draw(state, set));
  }
  render();
  return { state, set, render };
}

// Controls

let numbered = 0; // ids on the page, the same at each update

export function field(label, control, note) {
  const id = `field-${++numbered}`;
  const input = control.matches("input, select, textarea") ? control : control.querySelector("input, select, textarea");
  input.id ||= id;
  return el("div", { class: "field", "data-field": input.dataset.key }, el("label", { for: input.id }, label), control, note ? el("span", { class: "note" }, note) : null);
}

export function slider(key, label, value, { min = 0, max = 1, step = 0.01, shown = figure(value, 2), onset, marks = [] }) {
  const list = marks.length ? `marks-${++numbered}` : null;
  const input = el("input", { type: "range", "data-key": key, min, max, step, list, "aria-valuetext": shown, oninput: (event) => onset(Number(event.target.value)), value });
  return field(label, el("div", { class: "slider" }, input, el("output", {}, shown), list ? el("datalist", { id: list }, marks.map(([at, name]) => el("option", { value: at, label: name }))) : null));
}

export function select(key, label, value, options, onset) {
  return field(label, el("select", { "data-key": key, onchange: (event) => onset(event.target.value) },
    options.map(([name, text]) => el("option", { value: name, selected: name === value }, text))));
}

export function toggle(key, label, value, onset) {
  return el("label", { class: "toggle", "data-field": key }, el("input", { type: "checkbox", "data-key": key, checked: value, onchange: (event) => onset(event.target.checked) }), " ", label);
}

export function text(key, label, value, onset, { rows = 0, placeholder, invalid, list } = {}) {
  const attributes = { "data-key": key, spellcheck: "false", autocomplete: "off", placeholder, list, "aria-invalid": invalid ? "true" : null, oninput: (event) => onset(event.target.value), value };
  const control = rows ? el("textarea", { ...attributes, rows }) : el("input", { type: "text", ...attributes });
  return field(label, control, invalid ? el("span", { class: "wrong", role: "alert" }, invalid) : null);
}

export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

export function card(title, ...children) {
  return el("section", {}, title ? el("h2", {}, title) : null, ...children);
}

export function lead(title, words) {
  return el("header", { class: "lead" }, el("h1", {}, title), el("p", {}, words));
}

export function problem(error) {
  return el("p", { class: "wrong", role: "alert" }, error.message ?? String(error));
}

/** A matrix as a table; `onpick` handles a click on a cell, `shade` gives the fill of a cell from 0 to 1. */
export function table(name, a, { rows, columns, digits = 3, onpick, picked, shade, changed } = {}) {
  return el("figure", { class: "matrix" }, el("figcaption", {}, name),
    el("div", { class: "scroll" }, el("table", { "data-matrix": typeof name === "string" ? name : null },
      columns ? el("thead", {}, el("tr", {}, rows ? el("td") : null, columns.map((label) => el("th", { scope: "col" }, label)))) : null,
      el("tbody", {}, a.map((row, i) => el("tr", {}, rows ? el("th", { scope: "row" }, rows[i]) : null,
        row.map((x, j) => {
          const marked = picked && picked[0] === i && picked[1] === j;
          const content = onpick
            ? el("button", { type: "button", class: "cell", "data-key": `${name}-${i}-${j}`, "aria-pressed": String(Boolean(marked)), onclick: () => onpick(i, j), onkeydown: walk }, figure(x, digits))
            : figure(x, digits);
          const part = shade ? Math.max(0, Math.min(1, shade(x))) : 0;
          return el("td", { class: [marked && "picked", changed?.(i, j) && "changed"].filter(Boolean).join(" ") || null, style: shade ? { "--share": String(part) } : undefined, "data-shade": shade ? "" : null }, content);
        })))))));
}

/** Moves the focus from cell to cell by arrow keys. */
function walk(event) {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const move = moves[event.key];
  if (!move) return;
  const cell = event.currentTarget.closest("td");
  const row = cell.parentElement;
  const next = move[0] ? row.parentElement.rows[[...row.parentElement.rows].indexOf(row) + move[0]]?.cells[cell.cellIndex] : row.cells[cell.cellIndex + move[1]];
  const target = next?.querySelector("button");
  if (target) {
    event.preventDefault();
    target.focus();
  }
}

// Charts

/** Ticks at round numbers. */
function ticks(low, high, count = 5) {
  const raw = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const places = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) places.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return places;
}

export function short(x) {
  const size = Math.abs(x);
  if (size >= 1e18 || (size > 0 && size < 1e-3)) return x.toExponential(0).replace("e+", "e").replaceAll("-", "−");
  for (const [power, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= power) return `${Number((x / power).toPrecision(3))} ${unit}`;
  return String(Number(x.toPrecision(3))).replace("-", "−");
}

/** A line chart: curves are {name, x, y, colour?, faint?}; marks are {x, name}. Below is a table of the same numbers. */
export function chart(title, curves, { x = "", y = "", logX = false, logY = false, marks = [], width = 620, height = 320, low, high, points = false } = {}) {
  // On a phone a wide plot would shrink until its labels cannot be read.
  if (document.documentElement.clientWidth < 640) [width, height] = [Math.min(width, 380), Math.min(height, 250)];
  const fx = logX ? Math.log10 : (v) => v;
  const fy = logY ? Math.log10 : (v) => v;
  const real = curves.map((curve) => ({ ...curve, at: curve.x.map((v, n) => [v, curve.y[n]]).filter(([u, v]) => Number.isFinite(fx(u)) && Number.isFinite(fy(v))) }));
  const xs = real.flatMap((curve) => curve.at.map(([u]) => fx(u)));
  const ys = real.flatMap((curve) => curve.at.map(([, v]) => fy(v)));
  if (!xs.length) return el("p", { class: "soft" }, "Nothing to draw yet.");
  const [left, right, top, bottom] = [64, 14, 12, 42];
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [low === undefined ? Math.min(...ys) : fy(low), high === undefined ? Math.max(...ys) : fy(high)];
  if (y0 === y1) [y0, y1] = [y0 - 1, y1 + 1];
  const px = (v) => left + ((fx(v) - x0) / (x1 - x0 || 1)) * (width - left - right);
  const py = (v) => height - bottom - ((fy(v) - y0) / (y1 - y0)) * (height - top - bottom);
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title || `${curves.filter((curve) => !curve.faint).map((curve) => curve.name).join(", ")} over ${x}; the numbers are in the table below` });
  const xTicks = logX ? powers(x0, x1) : ticks(x0, x1, 6);
  const yTicks = logY ? powers(y0, y1) : ticks(y0, y1);
  for (const t of yTicks) {
    const at = py(t);
    plot.append(svg("line", { x1: left, x2: width - right, y1: at, y2: at, class: "rule" }), svg("text", { x: left - 7, y: at + 4, class: "tick", "text-anchor": "end" }, short(t)));
  }
  for (const t of xTicks) plot.append(svg("text", { x: px(t), y: height - bottom + 17, class: "tick", "text-anchor": "middle" }, short(t)));
  plot.append(svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }));
  for (const mark of marks) {
    if (fx(mark.x) < x0 || fx(mark.x) > x1) continue;
    plot.append(svg("line", { x1: px(mark.x), x2: px(mark.x), y1: top, y2: height - bottom, class: "mark" }), svg("text", { x: px(mark.x) + 4, y: top + 10, class: "tick" }, mark.name));
  }
  const frame = `clip-${++numbered}`;
  plot.append(svg("clipPath", { id: frame }, svg("rect", { x: left, y: top - 2, width: width - left - right, height: height - top - bottom + 4 })));
  real.forEach((curve, n) => {
    const along = curve.at.map(([u, v]) => `${px(u).toFixed(1)},${py(v).toFixed(1)}`).join(" ");
    plot.append(svg("polyline", { points: along, "clip-path": `url(#${frame})`, class: `curve c${(curve.colour ?? n) % 6}${curve.faint ? " faint" : ""}` }));
    if (points && curve.at.length <= 60) for (const [u, v] of curve.at) plot.append(svg("circle", { cx: px(u), cy: py(v), r: 3, class: `dot c${(curve.colour ?? n) % 6}` }, svg("title", {}, `${curve.name}: ${short(u)}, ${short(v)}`)));
  });
  plot.append(svg("text", { x: (left + width - right) / 2, y: height - 6, class: "label", "text-anchor": "middle" }, x), svg("text", { x: 0, y: 0, class: "label", "text-anchor": "middle", transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)` }, y));
  const legend = el("ul", { class: "legend" }, real.map((curve, n) => (curve.faint ? null : el("li", {}, svg("svg", { width: 28, height: 10, "aria-hidden": "true" }, svg("line", { x1: 1, x2: 27, y1: 5, y2: 5, class: `curve c${(curve.colour ?? n) % 6}` })), " ", curve.name))));
  return el("figure", { class: "chart" }, title ? el("figcaption", {}, title) : null, plot, real.length > 1 ? legend : null, data(real, x));
}

function data(curves, x) {
  return fold("The same as a table", () => {
    const keys = [...new Set(curves.flatMap((curve) => curve.at.map(([u]) => u)))].sort((a, b) => a - b);
    const step = Math.max(1, Math.ceil(keys.length / 60));
    const maps = curves.map((curve) => new Map(curve.at));
    return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "numbers" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, x || "x"), curves.map((curve) => el("th", { scope: "col", class: "n" }, curve.name)))),
      el("tbody", {}, keys.filter((_, n) => n % step === 0).map((key) => el("tr", {}, el("th", { scope: "row" }, short(key)), maps.map((map) => el("td", { class: "n" }, map.has(key) ? short(map.get(key)) : "")))))));
  });
}

function powers(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 7));
  const places = [];
  for (let p = Math.ceil(low - 1e-9); p <= high + 1e-9; p += step) places.push(10 ** p);
  return places;
}

export { el, figure, svg };
