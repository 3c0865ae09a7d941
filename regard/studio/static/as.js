// Attention as other operations: chosen queries and keys make it each of them, up to an error.

import { apart, attention, convolution, matrix, normal, parse, product, random } from "/core.js";
import { card, chart, el, figure, lead, live, select, slider, table, text } from "/ui.js";
import { heat, numbers } from "/view.js";

const DEFAULTS = { as: "convolution", beta: 8, n: 6, kernel: "0.25 0.5 0.25", order: "3 1 4 2 6 5" };
const KINDS = {
  identity: ["the identity", "Each query is its own position's key. The colder, the less of the others it takes."],
  permutation: ["a permutation", "Query i asks for the key of the position that is to come to i."],
  mean: ["the mean", "Queries of 0 have the same score with every key: exact at any β."],
  pointwise: ["a 1×1 convolution", "The identity again; the values are X W, the same W at every position."],
  convolution: ["a convolution", "A head for each tap asks for the key that many positions away, and W_O weighs the heads. Beyond the ends there is nothing to attend to, and the mask makes that 0."],
  dictionary: ["a dictionary", "Keys at right angles to each other. A query that is one of them finds its value; one that is none of them finds the mean."],
};

export function show(root) {
  live(root, "as", DEFAULTS, draw);

  function draw(state, set) {
    const n = Math.min(Math.max(2, Math.round(state.n)), 12);
    const kind = state.as in KINDS ? state.as : DEFAULTS.as;
    const next = random(5);
    const x = matrix(n, 3, () => Number(normal(next).toFixed(2)));
    let operation;
    let wrong = null;
    try { operation = build(kind, n, x, state); } catch (error) { wrong = error.message; operation = build(kind, n, x, { ...DEFAULTS, order: Array.from({ length: n }, (_, i) => n - i).join(" ") }); }
    const now = run(operation, state.beta);
    const error = apart(now.output, operation.target);
    const betas = Array.from({ length: 31 }, (_, i) => i);
    const errors = betas.map((beta) => apart(run(operation, beta).output, operation.target));
    const names = Array.from({ length: n }, (_, i) => String(i + 1));
    return [
      lead("Attention as…", "With positions for queries and keys, attention is many layers one knows. How exactly depends on β."),
      el("div", { class: "columns" },
        card("Which", select("as", "Attention as", kind, Object.entries(KINDS).map(([name, [label]]) => [name, label]), (as) => set({ as })),
          el("p", { class: "soft" }, KINDS[kind][1]),
          slider("beta", "β", state.beta, { min: 0, max: 30, step: 0.1, shown: figure(state.beta, 1), onset: (beta) => set({ beta }) }),
          slider("n", "Positions", n, { min: 2, max: 12, step: 1, shown: String(n), onset: (value) => set({ n: value }) }),
          kind === "convolution" ? text("kernel", "Taps, an odd number of them", state.kernel, (kernel) => set({ kernel }), { invalid: wrong }) : null,
          kind === "permutation" ? text("order", "Which position comes to 1, 2, …", state.order, (order) => set({ order }), { invalid: wrong }) : null),
        card("How exactly", el("p", { class: "answer", "data-fact": "error" }, `largest error ${figure(error, 3)}`),
          chart("", [{ name: "largest error", x: betas, y: errors.map((e) => Math.max(e, 1e-16)) }], { x: "β", y: "largest error", logY: true, marks: [{ x: state.beta, name: "now" }], height: 230 }))),
      card(operation.heads.length > 1 ? `Weights of the ${operation.heads.length} heads` : "Weights", el("div", { class: "matrices" }, now.heads.map((weights, h) =>
        el("figure", {}, operation.heads.length > 1 ? el("figcaption", {}, `head ${h + 1}, times ${figure(operation.heads[h].scale, 2)}`) : null, heat(weights, names, names.slice(0, weights[0].length), { label: `weights of head ${h + 1}`, cell: 20 }), numbers(weights, names, names.slice(0, weights[0].length)))))),
      card("What comes out", el("div", { class: "matrices" }, table(kind === "pointwise" ? "X W" : kind === "dictionary" ? "values" : "X", operation.input, { digits: 2 }), table("Attention", now.output), table(KINDS[kind][0], operation.target))),
    ];
  }
}

/** Queries and keys of each head, and what they are to compute. */
function build(kind, n, x, state) {
  const own = matrix(n, n, (i, j) => Number(i === j));
  const head = (query, key = own, value = x, allowed = null) => ({ query, key, value, allowed, scale: 1 });
  switch (kind) {
    case "identity": return { heads: [head(own)], input: x, target: x };
    case "mean": {
      const row = x[0].map((_, c) => x.reduce((sum, r) => sum + r[c], 0) / n);
      return { heads: [head(matrix(n, n, () => 0))], input: x, target: x.map(() => row) };
    }
    case "permutation": {
      const order = parse(state.order)[0].map((k) => k - 1);
      if (order.length !== n || new Set(order).size !== n || order.some((k) => !(Number.isInteger(k) && k >= 0 && k < n))) throw new Error(`write each of 1 to ${n} once`);
      return { heads: [head(order.map((k) => own[k]))], input: x, target: order.map((k) => x[k]) };
    }
    case "pointwise": {
      const mixed = product(x, [[1, 0], [0.5, -1], [0, 2]]);
      return { heads: [head(own, own, mixed)], input: mixed, target: mixed };
    }
    case "dictionary": {
      const key = matrix(4, 4, (i, j) => Number(i === j));
      const value = [[1, 0], [0, 1], [2, 2], [-1, 1]];
      const query = Array.from({ length: n }, (_, i) => key[(3 * i + 1) % 4]);
      return { heads: [head(query, key, value)], input: value, target: query.map((q) => value[q.indexOf(1)]) };
    }
    default: {
      const [kernel] = parse(state.kernel);
      if (kernel.length % 2 === 0 || kernel.length > 9) throw new Error("there must be 1, 3, 5, 7 or 9 taps");
      const middle = (kernel.length - 1) / 2;
      const heads = kernel.map((tap, t) => {
        const query = own.map((_, i) => own[i + t - middle] ?? own[0].map(() => 0));
        const allowed = own.map((_, i) => own[0].map(() => Number(Boolean(own[i + t - middle]))));
        return { ...head(query, own, x, allowed), scale: tap };
      });
      return { heads, input: x, target: convolution(x, kernel) };
    }
  }
}

function run(operation, beta) {
  const steps = operation.heads.map((head) => attention(head.query, head.key, head.value, { beta, allowed: head.allowed }));
  const output = steps[0].output.map((row, i) => row.map((_, c) => steps.reduce((sum, head, h) => sum + operation.heads[h].scale * head.output[i][c], 0)));
  return { heads: steps.map((head) => head.weights), output };
}
