// Positions: sinusoids of many frequencies, how alike they are, and what they change.

import { attention, dot, matrix, normal, random, similarity, sinusoidal } from "/core.js";
import { card, chart, el, figure, lead, live, select, slider, text } from "/ui.js";
import { heat, numbers, paint } from "/view.js";

const DEFAULTS = { width: 32, base: 10000, length: 48, how: "added", text: "dog bites man", other: "man bites dog" };

export function show(root) {
  live(root, "positions", DEFAULTS, draw);

  function draw(state, set) {
    const width = Math.max(2, 2 * Math.round(state.width / 2));
    const length = Math.min(Math.max(4, Math.round(state.length)), 256);
    const base = Math.max(2, state.base);
    const rows = sinusoidal(length, width, base);
    const distances = Array.from({ length }, (_, n) => n);
    const falling = distances.map((n) => similarity(n, width, base) / (width / 2));
    const alike = matrix(length, length, (n, m) => falling[Math.abs(n - m)]);
    return [
      lead("Positions", "Attention alone knows no order. A vector for each position gives it one: pairs of sine and cosine, from fast to slow."),
      card(null, el("div", { class: "columns" },
        slider("width", "Width d", width, { min: 2, max: 128, step: 2, shown: String(width), onset: (value) => set({ width: value }) }),
        slider("base", "Base, which sets the slowest wave", Math.log10(base), { min: 0.5, max: 6, step: 0.05, shown: figure(base, 0), onset: (value) => set({ base: Number((10 ** value).toPrecision(3)) }) }),
        slider("length", "Positions n", length, { min: 4, max: 256, step: 1, shown: String(length), onset: (value) => set({ length: value }) }))),
      el("div", { class: "columns" },
        card("r_n, a row for each position", pixels(rows, "Positional encoding: a row for each position, a column for each dimension", "dimension"), el("p", { class: "soft" }, `Wavelengths from 2π to ${figure(2 * Math.PI * base ** ((width - 2) / width), 0)} positions. Orange is below 0.`)),
        card("r_n · r_m, for every pair", pixels(alike, "Similarity of every pair of positions", "m ="), el("p", { class: "soft" }, "The same along every diagonal: it depends on the distance alone."))),
      card("How alike, by distance", chart("", [{ name: "r_n · r_m / (d/2)", x: distances, y: falling }], { x: "distance |n − m|", y: "similarity", low: -1, high: 1.02, height: 260 })),
      order(state, set, width, base),
    ];
  }

  function pixels(a, label, column) {
    const canvas = el("canvas", { class: "dense", role: "img", "aria-label": label, style: { width: "100%", height: "22rem" } });
    paint(canvas, a);
    const count = (n, name) => Array.from({ length: n }, (_, i) => `${name} ${i}`);
    return [canvas, numbers(a, count(a.length, "n ="), count(a[0].length, column))];
  }

  /** The same words in two orders: what comes out for each, with positions and without. */
  function order(state, set, width, base) {
    const sides = [state.text, state.other].map((sentence) => sentence.trim().split(/\s+/).filter(Boolean).slice(0, 10));
    const result = (words, place) => {
      const x = words.map((word) => vector(word, width));
      const r = sinusoidal(words.length, width, base);
      const input = place === "none" ? x : place === "added" ? x.map((row, n) => row.map((v, i) => v + r[n][i])) : x.map((row, n) => [...row, ...r[n]]);
      return attention(input, input, x).output;
    };
    const bag = [...new Set(sides[0])].filter((word) => sides[1].includes(word));
    const gap = (place) => {
      const [first, other] = sides.map((words) => result(words, place));
      return bag.map((word) => distance(first[sides[0].indexOf(word)], other[sides[1].indexOf(word)]));
    };
    const [without, placed] = [gap("none"), gap(state.how)];
    const most = (gaps) => (gaps.length ? Math.max(...gaps) : 0);
    const sameBag = [...sides[0]].sort().join(" ") === [...sides[1]].sort().join(" ");
    return card("Order, or a bag of words",
      el("div", { class: "columns" }, text("text", "A sentence", state.text, (value) => set({ text: value })), text("other", "The same words in another order", state.other, (value) => set({ other: value })),
        select("how", "Positions are", state.how, [["added", "added to the words"], ["concatenated", "put beside them"]], (how) => set({ how }))),
      el("p", {}, sameBag ? "The same bag of words. " : "Not the same words: even a bag tells these apart. ",
        "For each word, how far its output in one order is from its output in the other:"),
      el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "word"), el("th", { scope: "col", class: "n" }, "without positions"), el("th", { scope: "col", class: "n" }, `positions ${state.how}`))),
        el("tbody", {}, bag.map((word, n) => el("tr", {}, el("th", { scope: "row" }, word), el("td", { class: "n" }, figure(without[n], 3)), el("td", { class: "n" }, figure(placed[n], 3))))))),
      el("p", { class: "soft", "data-fact": "order" }, `Largest: ${figure(most(without), 3)} without positions, ${figure(most(placed), 3)} with them.`),
      sides[0].length && sides[0].length < 11 ? el("div", { class: "matrices" }, ["none", state.how].map((place) => {
        const words = sides[0];
        const x = words.map((word) => vector(word, width));
        const r = sinusoidal(words.length, width, base);
        const input = place === "none" ? x : place === "added" ? x.map((row, n) => row.map((v, i) => v + r[n][i])) : x.map((row, n) => [...row, ...r[n]]);
        const { weights } = attention(input, input, x);
        return el("figure", {}, el("figcaption", {}, place === "none" ? "weights without positions" : `weights, positions ${place}`), heat(weights, words, words, { label: "weights", cell: 26 }), numbers(weights, words, words));
      })) : null);
  }
}

/** A vector for a word: the same for the same letters, and random otherwise. */
function vector(word, width) {
  const next = random([...word].reduce((sum, letter) => (Math.imul(31, sum) + letter.codePointAt(0)) >>> 0, 17));
  return Array.from({ length: width }, () => 0.5 * normal(next));
}

function distance(a, b) {
  const gap = a.map((x, n) => x - b[n]);
  return Math.sqrt(dot(gap, gap));
}

