// Attention by hand: every matrix from queries, keys and values to the output, and its arithmetic.

import { attention, entropy, operations, parse, product, random, transpose } from "/core.js";
import { button, card, el, figure, lead, live, problem, select, slider, table, text } from "/ui.js";
import { changes } from "/models.js";
import { sign } from "/view.js";

const PRESETS = {
  exercise3: ["Exercise 3: two queries, three keys", { q: "1 2; 3 1", k: "2 1; 1 1; 0 1", v: "1 2 -2; 1 1 2; 0 1 -1" }],
  exercise2: ["Exercise 2: one query over three states", { q: "1 2 1", k: "1 2 3; 1 2 1; 0 1 -1", v: "1 2 3; 1 2 1; 0 1 -1", beta: "1" }],
  words: ["Four words attend to each other", { q: "1 0 0; 0 1 0; 1 1 0; 0 0 1", k: "1 0 0; 0 1 0; 1 1 0; 0 0 1", v: "1 0 0; 0 1 0; 1 1 0; 0 0 1" }],
  dictionary: ["A dictionary: each query has its key", { q: "4 0 0; 0 4 0; 0 0 4", k: "4 0 0; 0 4 0; 0 0 4", v: "1 0; 0 1; 1 1" }],
};
const PROJECTED = { x: "1 0 1; 0 2 0; 1 1 1", wq: "1 0; 0 1; 1 0", wk: "0 1; 1 0; 1 1", wv: "1 0 2; 0 1 0; 1 1 0" };
// A row of a matrix on a line of its own.
for (const [, fields] of Object.values(PRESETS)) for (const name of ["q", "k", "v"]) fields[name] = fields[name].replaceAll("; ", "\n");
for (const name of Object.keys(PROJECTED)) PROJECTED[name] = PROJECTED[name].replaceAll("; ", "\n");
const DEFAULTS = { preset: "exercise3", input: "qkv", ...PRESETS.exercise3[1], ...PROJECTED, beta: "natural", mask: "none", drawn: "", convention: "rows", order: "", cell: "", until: 0, run: "", text: "", attention: "", head: 0, beams: 0, off: "", betas: "", hidden: "", forced: "" };
const MASKS = [["none", "none"], ["causal", "causal"], ["window", "window of 1"], ["drawn", "drawn by hand"]];
const STEPS = {
  scores: ["Scores", "S = Q Kᵀ", "Each query with each key: their dot product."],
  scaled: ["Scaled", "β S", "Times β, so that the softmax is neither flat nor a single peak."],
  masked: ["Masked", "β S + M", "−∞ where a query may not look."],
  exponentials: ["Exponentials", "E = exp(S − max)", "The maximum of each row is subtracted first, which changes no weight and overflows nowhere."],
  weights: ["Weights", "A = E / Σ E", "Each row divided by its sum: a query's weights add up to 1."],
  output: ["Output", "C = A V", "Each query takes the mean of the values, by these weights."],
};
const COLUMNS = { scores: "Sᵀ = K Qᵀ", scaled: "β Sᵀ", masked: "β Sᵀ + Mᵀ", exponentials: "Eᵀ", weights: "Aᵀ", output: "Cᵀ = Vᵀ Aᵀ" };

export async function show(root, ask) {
  let real = null;
  let trouble = null;
  const page = live(root, "byhand", DEFAULTS, draw);
  if (page.state.run) {
    try {
      const { run, text: source, attention: name, head, beams, off, betas: beta, hidden, forced } = page.state;
      real = await ask("head", { run, text: source, attention: name, head, ...(beams ? { beams } : {}), ...changes({ off, beta, hidden, forced }) });
    } catch (error) { trouble = error; }
    page.render();
  }

  function draw(state, set) {
    const parts = [lead("Attention by hand", "Type queries, keys and values, and follow them to the output. Click any number for its arithmetic.")];
    if (state.run && !real && !trouble) return [...parts, el("p", { class: "soft", "aria-busy": "true" }, `Reading a head of ${state.run} …`)];
    if (trouble) parts.push(problem(trouble));
    const inputs = read(state);
    parts.push(el("div", { class: "columns" }, card("Inputs", typing(state, set, inputs)), card("Sharpness and mask", settings(state, set, inputs))));
    if (inputs.error) return parts;
    const steps = attention(inputs.query, inputs.key, inputs.value, inputs);
    const names = Object.keys(STEPS).filter((name) => name !== "masked" || inputs.allowed);
    const until = Math.min(state.until || names.length, names.length);
    parts.push(stepping(names, until, state, set));
    parts.push(el("ol", { class: "stages" }, names.slice(0, until).map((name, n) => el("li", {}, step(n + 1, name, steps, inputs, state, set)))));
    if (until === names.length) parts.push(operationCounts(inputs, state));
    return parts;
  }

  /** Buttons that show one step after the other, for a class, or all at once. */
  function stepping(names, until, state, set) {
    if (!state.until) return el("p", { class: "controls" }, button("Step by step", () => set({ until: 1 }), { "data-key": "step" }));
    return el("p", { class: "controls" },
      until < names.length ? button(`Next: ${STEPS[names[until]][0].toLowerCase()}`, () => set({ until: until + 1 }), { "data-key": "step" }) : button("From the beginning", () => set({ until: 1 }), { "data-key": "step" }),
      button("All steps", () => set({ until: 0 })));
  }

  /** Queries, keys and values from the typed text, or the errors in it. */
  function read(state) {
    if (real) {
      return { query: real.query, key: real.key, value: real.value, allowed: real.allowed, beta: state.beta === "natural" ? real.beta : sharpness(state.beta, real.key[0].length), rows: real.rows.map(sign), columns: real.columns.map(sign), wrong: {} };
    }
    const matrices = {};
    const wrong = {};
    const names = state.input === "qkv" ? ["q", "k", "v"] : ["x", "wq", "wk", "wv"];
    for (const name of names) try { matrices[name] = parse(state[name]); } catch (error) { wrong[name] = error.message; }
    const fail = (name, message) => { wrong[name] ??= message; };
    let { q, k, v } = matrices;
    if (state.input === "x" && !Object.keys(wrong).length) {
      const width = matrices.x[0].length;
      for (const name of ["wq", "wk", "wv"]) if (matrices[name].length !== width) fail(name, `X has ${width} columns, so this needs ${width} rows; it has ${matrices[name].length}`);
      if (matrices.wq[0].length !== matrices.wk[0].length) fail("wk", `W_Q has ${matrices.wq[0].length} columns and W_K ${matrices.wk[0].length}; they must be as many`);
      if (!Object.keys(wrong).length) [q, k, v] = ["wq", "wk", "wv"].map((name) => product(matrices.x, matrices[name]));
    }
    if (q && k && q[0].length !== k[0].length) fail("k", `queries have ${q[0].length} columns and keys ${k[0].length}; they must be as wide`);
    if (k && v && k.length !== v.length) fail("v", `there are ${k.length} keys and ${v.length} values; each key needs a value`);
    if (q && (q.length > 24 || k?.length > 24)) fail("q", "24 rows are the most that fit here");
    if (Object.keys(wrong).length) return { wrong, error: true };
    const order = state.order ? state.order.split(".").map(Number) : k.map((_, n) => n);
    const valid = order.length === k.length && new Set(order).size === k.length && order.every((n) => n >= 0 && n < k.length);
    const places = valid ? order : k.map((_, n) => n);
    return { query: q, key: places.map((n) => k[n]), value: places.map((n) => v[n]), columns: places.map((n) => `k${n + 1}`), rows: q.map((_, n) => `q${n + 1}`), beta: sharpness(state.beta, k[0].length), allowed: mask(state, q.length, k.length), wrong, places };
  }

  function typing(state, set, inputs) {
    if (real) {
      return [el("p", {}, `Head ${state.head + 1} of ${state.attention} in ${state.run}, while it translated “${state.text}”: ${real.query.length} queries, ${real.key.length} keys, width ${real.key[0].length}.`),
        el("details", {}, el("summary", {}, "Its queries, keys and values"), el("div", { class: "matrices" }, ["query", "key", "value"].map((name) => table(name[0].toUpperCase(), real[name], { rows: (name === "query" ? real.rows : real.columns).map(sign), digits: 2 })))),
        el("p", {}, button("Back to typed numbers", () => { real = null; set({ run: "", text: "", attention: "", head: 0, beta: "natural" }); }))];
    }
    const matrixField = (name, label) => text(name, label, state[name], (value) => set({ [name]: value, preset: "own", order: "", cell: "" }), { rows: Math.min(6, Math.max(2, state[name].split(/[;\n]/).length)), invalid: inputs.wrong[name] });
    const fields = state.input === "qkv" ? [["q", "Q: queries"], ["k", "K: keys"], ["v", "V: values"]] : [["x", "X"], ["wq", "W_Q"], ["wk", "W_K"], ["wv", "W_V"]];
    return [
      el("div", { class: "controls" },
        select("preset", "Begin with", state.preset, [...Object.entries(PRESETS).map(([name, [label]]) => [name, label]), ["projected", "X with W_Q, W_K, W_V"], ["own", "numbers of your own"]], (name) => choose(name, set)),
        button("Shuffle keys and values together", () => set({ order: shuffle(inputs.key?.length ?? 0, state.order).join("."), cell: "" }), { disabled: Boolean(inputs.error) }),
        state.order ? button("Put them back", () => set({ order: "", cell: "" })) : null),
      el("p", { class: "note" }, "A row on each line, or rows divided by ; – fractions and roots too: 1/3, √2."),
      el("div", { class: "fields" }, fields.map(([name, label]) => matrixField(name, label))),
      state.input === "x" && !inputs.error ? el("div", { class: "matrices" }, [["Q = X W_Q", inputs.query], ["K = X W_K", inputs.key], ["V = X W_V", inputs.value]].map(([name, a]) => table(name, a))) : null,
      state.order ? el("p", { class: "soft" }, "The columns of the weights moved with their keys. The output is the same: attention over a set of pairs knows no order.") : null,
    ];
  }

  function choose(name, set) {
    if (name === "own") return set({ preset: "own" });
    if (name === "projected") return set({ preset: name, input: "x", ...PROJECTED, order: "", cell: "", beta: "natural" });
    set({ preset: name, input: "qkv", order: "", cell: "", beta: "natural", ...PRESETS[name][1] });
  }

  function settings(state, set, inputs) {
    const natural = inputs.error ? 1 : 1 / Math.sqrt(inputs.key[0].length);
    const beta = inputs.error ? natural : inputs.beta;
    // The slider runs over log₂ β, and has 0 and ∞ at its ends.
    const place = beta === 0 ? -7 : beta === Infinity ? 7 : Math.max(-6.9, Math.min(6.9, Math.log2(beta)));
    const set_ = (at) => set({ beta: at <= -7 ? "0" : at >= 7 ? "inf" : Math.abs(at - Math.log2(natural)) < 0.06 ? "natural" : String(Number((2 ** at).toPrecision(4))) });
    return [
      slider("beta", "β, from hot (0, the mean of all values) to cold (∞, the best key alone)", place, { min: -7, max: 7, step: 0.05, shown: beta === Infinity ? "∞" : figure(beta, 3), onset: set_, marks: [[Math.log2(natural), "1/√d"]] }),
      el("p", { class: "controls" }, [["0", "0"], ["natural", "1/√d"], ["1", "1"], ["inf", "∞"]].map(([value, label]) => button(label, () => set({ beta: value }), { "aria-pressed": String(state.beta === value), "data-key": `beta-${value}` }))),
      inputs.error ? null : el("p", { class: "soft" }, `1/√d is ${figure(natural, 3)} here. Mean entropy of the rows: ${figure(mean(attention(inputs.query, inputs.key, inputs.value, inputs).weights.map(entropy)), 3)} nats of at most ${figure(Math.log(inputs.key.length), 3)}.`),
      real ? null : select("mask", "Mask", state.mask, MASKS, (mask) => set({ mask, cell: "" })),
      state.mask === "drawn" && !inputs.error && !real ? drawing(state, set, inputs) : null,
      select("convention", "Vectors are", state.convention, [["rows", "rows: softmax(Q Kᵀ) V"], ["columns", "columns: V softmax(Kᵀ Q)"]], (convention) => set({ convention })),
    ];
  }

  function drawing(state, set, inputs) {
    const [L, S] = [inputs.query.length, inputs.key.length];
    const flip = (i, j) => set({ drawn: inputs.allowed.map((row, r) => row.map((x, c) => Number(r === i && c === j ? !x : x)).join("")).join(".") });
    return el("div", {}, el("p", { class: "note" }, "Click a cell to allow or forbid it."),
      el("div", { class: "maskgrid", role: "group", "aria-label": "mask", style: { gridTemplateColumns: `repeat(${S}, auto)` } },
        Array.from({ length: L * S }, (_, n) => [Math.floor(n / S), n % S]).map(([i, j]) => el("button", { type: "button", "data-key": `draw-${i}-${j}`, "aria-pressed": String(Boolean(inputs.allowed[i][j])), "aria-label": `query ${i + 1} may attend to key ${j + 1}`, onclick: () => flip(i, j) }))));
  }

  function step(number, name, steps, inputs, state, set) {
    const [title, equation, sentence] = STEPS[name];
    const columns = state.convention === "columns";
    const picked = state.cell.startsWith(`${name}.`) ? state.cell.split(".").slice(1).map(Number) : null;
    const a = columns ? transpose(steps[name]) : steps[name];
    const rows = inputs.rows.map((label, n) => (name === "output" ? (real ? label : `c${n + 1}`) : label));
    const across = name === "output" ? steps.output[0].map((_, n) => String(n + 1)) : inputs.columns;
    const onpick = (i, j) => set({ cell: [name, ...(columns ? [j, i] : [i, j])].join(".") });
    const matrix = table(title, a, { rows: columns ? across : rows, columns: columns ? rows : across, onpick, picked: picked && (columns ? [picked[1], picked[0]] : picked), shade: name === "weights" || name === "exponentials" ? (x) => x : undefined });
    matrix.querySelector("table").dataset.step = name;
    return el("section", {}, el("h2", {}, `${number}  ${title} `, el("span", { class: "equation" }, columns ? COLUMNS[name] : equation)), el("p", { class: "soft" }, sentence), matrix,
      picked && a.length ? el("p", { class: "arithmetic", role: "status" }, arithmetic(name, picked[0], picked[1], steps, inputs)) : null);
  }

  function arithmetic(name, i, j, steps, inputs) {
    const f = (x) => figure(x, 3);
    const sum = (a, b) => a.map((x, n) => `${f(x)}·${x < 0 || b[n] < 0 ? paren(b[n]) : f(b[n])}`).join(" + ");
    const paren = (x) => (x < 0 ? `(${f(x)})` : f(x));
    const row = `${inputs.rows[i]}`;
    switch (name) {
      case "scores": return `${row}·${inputs.columns[j]} = ${sum(inputs.query[i], inputs.key[j])} = ${f(steps.scores[i][j])}`;
      case "scaled": return steps.beta === Infinity ? `β = ∞ keeps the best key: ${f(steps.scaled[i][j])}` : `β·${f(steps.scores[i][j])} = ${f(steps.beta)}·${paren(steps.scores[i][j])} = ${f(steps.scaled[i][j])}`;
      case "masked": return inputs.allowed[i][j] ? `allowed: ${f(steps.scaled[i][j])} + 0 = ${f(steps.masked[i][j])}` : `forbidden: ${f(steps.scaled[i][j])} + −∞ = −∞`;
      case "exponentials": return `exp(${f(steps.masked[i][j])} − ${paren(Math.max(...steps.masked[i]))}) = ${f(steps.exponentials[i][j])}`;
      case "weights": return `${f(steps.exponentials[i][j])} / (${steps.exponentials[i].map(f).join(" + ")}) = ${f(steps.weights[i][j])}`;
      default: return `${steps.weights[i].map((w, n) => `${f(w)}·${paren(inputs.value[n][j])}`).join(" + ")} = ${f(steps.output[i][j])}`;
    }
  }

  function operationCounts(inputs, state) {
    const [L, S, K, V] = [inputs.query.length, inputs.key.length, inputs.key[0].length, inputs.value[0].length];
    const counts = operations(L, S, K, V, { beta: state.beta === "natural" && !real ? null : inputs.beta, masked: Boolean(inputs.allowed) });
    return card("Operations", el("p", { class: "soft" }, `${L} queries, ${S} keys, widths ${K} and ${V}: O(n_q n_k (d_k + d_v)). Subtracting the maximum is not counted.`),
      el("div", { class: "scroll" }, el("table", { "data-step": "operations" },
        el("thead", {}, el("tr", {}, ["", "multiplications", "divisions", "additions", "exponentials"].map((name) => (name ? el("th", { scope: "col", class: "n" }, name) : el("td"))))),
        el("tbody", {}, Object.entries(counts).map(([name, numbers]) => el("tr", {}, el("th", { scope: "row" }, name), numbers.map((n) => el("td", { class: "n" }, n.toLocaleString("en")))))))));
  }
}

function sharpness(value, width) {
  if (value === "inf") return Infinity;
  if (value === "natural") return 1 / Math.sqrt(width);
  const beta = Number(value);
  return Number.isFinite(beta) && beta >= 0 ? beta : 1 / Math.sqrt(width);
}

function mask(state, L, S) {
  if (state.mask === "causal") return Array.from({ length: L }, (_, i) => Array.from({ length: S }, (_, j) => Number(j <= i + S - L)));
  if (state.mask === "window") return Array.from({ length: L }, (_, i) => Array.from({ length: S }, (_, j) => Number(Math.abs(j - (i + S - L)) <= 1)));
  if (state.mask !== "drawn") return null;
  const rows = state.drawn.split(".");
  return Array.from({ length: L }, (_, i) => Array.from({ length: S }, (_, j) => Number((rows[i]?.[j] ?? "1") === "1")));
}

function shuffle(count, before) {
  const order = Array.from({ length: count }, (_, n) => n);
  const next = random([...before].reduce((sum, letter) => 31 * sum + letter.charCodeAt(0), 7));
  for (let n = count - 1; n > 0; n--) {
    const other = Math.floor(next() * (n + 1));
    [order[n], order[other]] = [order[other], order[n]];
  }
  return order.every((place, n) => place === n) ? order.reverse() : order;
}

function mean(numbers) {
  return numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
}

export { PRESETS };
