// Cost: what layers take as sequences grow, where one becomes dearer than the other, and models.

import { LAYERS, crossover, layerCost } from "/core.js";
import { card, chart, el, lead, live, problem, short, slider, toggle } from "/ui.js";
import { asker } from "/models.js";

const DEFAULTS = { n: 512, d: 512, h: 8, k: 3, w: 64, of: "multiplyAdds", hidden: "GRU.attention in a window.depthwise convolution", models: "base.big.vit-b/16" };

export function show(root, ask) {
  let costs = {};
  let choices = [["tiny", "tiny"], ["base", "base"], ["big", "big"], ["vit-b/16", "ViT-B/16"]];
  let trouble = null;
  const page = live(root, "cost", DEFAULTS, draw);
  const request = asker(ask, "cost", (answer, error) => {
    [costs, trouble] = [answer ?? costs, error];
    page.render();
  });
  const fetchModels = (state) => request({ models: state.models.split(".").filter(Boolean), length: state.n });
  ask("runs").then((answer) => { choices = [...choices, ...answer.runs.filter((run) => run.ready).map((run) => [run.name, run.name])]; page.render(); }).catch(() => {});
  fetchModels(page.state);

  function draw(state, set) {
    const sizes = { n: state.n, d: state.d, k: state.k, w: state.w };
    const hidden = new Set(state.hidden.split(".").filter(Boolean));
    const layerNames = LAYERS.map(([name]) => name).filter((name) => !hidden.has(name));
    const lengths = Array.from({ length: 57 }, (_, i) => Math.round(2 ** (3 + i / 4))).filter((x, i, all) => x !== all[i - 1]);
    const flip = (name) => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); set({ hidden: [...hidden].join(".") }); };
    return [
      lead("Cost", "Attention costs n² d, a recurrence n d², a convolution k n d². Which is dearer is a question of n and d."),
      card(null, el("div", { class: "columns" },
        size("n", "Positions n", state, set, 0, 14, (n) => fetchModels({ ...state, n })), size("d", "Width d", state, set, 3, 13), slider("k", "Kernel k", state.k, { min: 1, max: 15, step: 2, shown: String(state.k), onset: (k) => set({ k }) }), size("w", "Window w, on each side", state, set, 0, 11), size("h", "Heads h", state, set, 0, 6))),
      el("div", { class: "wide" },
        card("Multiply-adds of one layer", chart("", layerNames.map((name) => ({ name, x: lengths, y: lengths.map((n) => layerCost(name, { ...sizes, n }).multiplyAdds) })), { x: "positions n", y: "multiply-adds", logX: true, logY: true, marks: [{ x: state.n, name: `n = ${state.n}` }], height: 400 })),
        card("Show", el("div", {}, LAYERS.map(([name]) => el("div", {}, toggle(`show-${name}`, name, !hidden.has(name), () => flip(name))))))),
      card(`At n = ${state.n}, d = ${state.d}`, layers(sizes)),
      card("From which length on attention costs more", crossovers(state)),
      card("Attention's memory", el("p", {}, `The weights of ${state.h} heads are ${short(state.h * state.n * state.n)} numbers, ${short(4 * state.h * state.n * state.n)}B in float32 for each sentence and layer. A fused kernel keeps none of them. Heads change no multiply-add: h times d/h is d.`)),
      card("Models side by side", el("div", { class: "controls" }, choices.map(([name, label]) => toggle(`model-${name}`, label, state.models.split(".").includes(name), () => {
        const chosen = new Set(state.models.split(".").filter(Boolean));
        chosen.has(name) ? chosen.delete(name) : chosen.add(name);
        const models = [...chosen].slice(0, 8).join(".");
        set({ models });
        fetchModels({ ...state, models });
      }))), trouble ? problem(trouble) : models(state)),
    ];
  }

  function models(state) {
    const chosen = state.models.split(".").filter((name) => costs[name]);
    if (!chosen.length) return el("p", { class: "soft", "aria-busy": "true" }, "Counting …");
    const parts = Object.keys(costs[chosen[0]].parts).filter((part) => chosen.some((name) => costs[name].parts[part]?.[1]));
    const row = (label, cell, key) => el("tr", {}, el("th", { scope: "row" }, label), chosen.map((name) => el("td", { class: "n", "data-fact": key && `${key}-${name}` }, cell(costs[name]))));
    return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("td"), chosen.map((name) => el("th", { scope: "col", class: "n" }, name)))),
      el("tbody", {},
        row("parameters", (one) => one.parameters.toLocaleString("en"), "parameters"),
        row("weights in float32", (one) => `${short(4 * one.parameters)}B`),
        row("weights, gradients and Adam in training", (one) => `${short(16 * one.parameters)}B`),
        row("positions", (one) => one.length.toLocaleString("en")),
        row("multiply-adds, forward", (one) => short(one.multiplyAdds)),
        parts.map((part) => row(el("span", { class: "soft" }, `of which ${part}`), (one) => `${((100 * (one.parts[part]?.[1] ?? 0)) / one.multiplyAdds).toFixed(1)} %`)))));
  }
}

function size(key, label, state, set, low, high, then) {
  const value = state[key];
  return slider(key, label, Math.log2(value), { min: low, max: high, step: key === "n" || key === "d" ? 0.25 : 1, shown: value.toLocaleString("en"), onset: (at) => { const x = Math.round(2 ** at); set({ [key]: x }); then?.(x); } });
}

function layers(sizes) {
  return el("div", { class: "scroll" }, el("table", { "data-step": "layers" }, el("thead", {}, el("tr", {}, ["layer", "parameters", "", "multiply-adds", "", "steps in a row", "longest path"].map((name) => (name ? el("th", { scope: "col", class: name === "layer" ? null : "n" }, name) : el("td"))))),
    el("tbody", {}, LAYERS.map(([name, parameters, multiplyAdds]) => {
      const cost = layerCost(name, sizes);
      return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "n" }, short(cost.parameters)), el("td", { class: "soft" }, parameters), el("td", { class: "n" }, short(cost.multiplyAdds)), el("td", { class: "soft" }, multiplyAdds), el("td", { class: "n" }, short(cost.steps)), el("td", { class: "n" }, cost.path === null ? "none" : short(cost.path)));
    }))));
}

function crossovers(state) {
  const others = [["plain recurrence", 2], ["GRU", 6], ["LSTM", 8], [`convolution, ${state.k} taps`, state.k]];
  const cell = (a, b) => {
    const n = crossover(a, b, state.d);
    return el("td", { class: "n", "data-fact": `cross-${a}-${b}` }, n === null ? "always" : `n > ${n.toLocaleString("en")}`);
  };
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "dearer than"), el("th", { scope: "col", class: "n" }, "attention alone"), el("th", { scope: "col", class: "n" }, "with projections"))),
    el("tbody", {}, others.map(([name, b]) => el("tr", {}, el("th", { scope: "row" }, name), cell(0, b), cell(4, b))))));
}
