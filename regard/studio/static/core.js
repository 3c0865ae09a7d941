// Attention, positions and costs in numbers: the studio's arithmetic, in one module without a DOM.
// Python's results are the reference: tests/studio compares every function to 1e-12.

export function matrix(rows, columns, cell) {
  return Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => cell(i, j)));
}

export function transpose(a) {
  return a.length ? matrix(a[0].length, a.length, (i, j) => a[j][i]) : [];
}

export function dot(a, b) {
  let sum = 0;
  for (let n = 0; n < a.length; n++) sum += a[n] * b[n];
  return sum;
}

/** A B */
export function product(a, b) {
  const columns = transpose(b);
  return a.map((row) => columns.map((column) => dot(row, column)));
}

/** The largest distance between two matrices' cells. */
export function apart(a, b) {
  let most = 0;
  a.forEach((row, i) => row.forEach((x, j) => {
    if (x !== b[i][j]) most = Math.max(most, Math.abs(x - b[i][j]));
  }));
  return most;
}

/**
 * softmax(β Q Kᵀ + mask) V with every step on the way, as regard.lab.steps has them.
 * `allowed` is a matrix of 0 and 1, or null; β may be Infinity, which keeps the best keys.
 * A row that may attend to nothing has weights 0.
 */
export function attention(query, key, value, { beta = null, allowed = null } = {}) {
  const width = key[0]?.length ?? 0;
  const sharpness = beta ?? 1 / Math.sqrt(Math.max(1, width));
  const scores = product(query, transpose(key));
  const may = (i, j) => !allowed || Boolean(allowed[i][j]);
  let scaled;
  if (sharpness === Infinity) {
    scaled = scores.map((row, i) => {
      const best = Math.max(...row.map((x, j) => (may(i, j) ? x : -Infinity)));
      return row.map((x) => (x === best ? 0 : -Infinity));
    });
  } else scaled = scores.map((row) => row.map((x) => sharpness * x));
  const masked = scaled.map((row, i) => row.map((x, j) => (may(i, j) ? x : -Infinity)));
  const exponentials = masked.map((row) => {
    const largest = Math.max(...row);
    return row.map((x) => Math.exp(x - (largest === -Infinity ? 0 : largest)));
  });
  const weights = exponentials.map((row) => {
    const sum = Math.max(1, row.reduce((all, x) => all + x, 0));
    return row.map((x) => x / sum);
  });
  return { beta: sharpness, scores, scaled, masked, exponentials, weights, output: product(weights, value) };
}

/** Operations of each step; a sum of n products has n − 1 additions, as in regard.lab.steps. */
export function operations(L, S, K, V, { beta = null, masked = false } = {}) {
  const pairs = L * S;
  const sharpness = beta ?? 1 / Math.sqrt(Math.max(1, K));
  const natural = Math.abs(sharpness * Math.sqrt(K) - 1) <= 1e-9;
  let scaling = [pairs, 0, 0, 0];
  if (sharpness === 1 || sharpness === Infinity) scaling = [0, 0, 0, 0];
  else if (natural) scaling = [0, pairs, 0, 0];
  const steps = {
    scores: [pairs * K, 0, pairs * Math.max(0, K - 1), 0],
    scaled: scaling,
    ...(masked ? { masked: [0, 0, pairs, 0] } : {}),
    weights: [0, pairs, L * Math.max(0, S - 1), pairs],
    output: [L * V * S, 0, L * V * Math.max(0, S - 1), 0],
  };
  const total = [0, 1, 2, 3].map((n) => Object.values(steps).reduce((sum, one) => sum + one[n], 0));
  return { ...steps, total };
}

/** Entropy of weights in nats. */
export function entropy(row) {
  return -row.reduce((sum, x) => sum + (x > 0 ? x * Math.log(x) : 0), 0);
}

// Geometry: one key moves

/**
 * Key j moves by `move`: the exact weights and output, and what the derivative predicts.
 *   a'_j = a_j e^{βδ} / (1 + a_j (e^{βδ} − 1)),  δ = move · q
 *   linear: h + β δ a_j (v_j − h)
 */
export function movedKey(query, key, value, j, move, beta = null) {
  const before = attention([query], key, value, { beta });
  const after = attention([query], key.map((row, n) => (n === j ? row.map((x, i) => x + move[i]) : row)), value, { beta });
  const delta = dot(move, query);
  const a = before.weights[0][j];
  const grown = Math.exp(before.beta * delta);
  const weight = (a * grown) / (1 + a * (grown - 1));
  const h = before.output[0];
  const linear = h.map((x, i) => x + before.beta * delta * a * (value[j][i] - x));
  const linearWeight = a + before.beta * delta * a * (1 - a);
  const others = h.map((x, i) => (x - a * value[j][i]) / (1 - a));
  return { before, after, delta, weight, linear, linearWeight, others };
}

// Positions

/** r_{n,i} = sin(n / base^{i/D}) for even i, cos(n / base^{(i−1)/D}) for odd i. */
export function sinusoidal(length, width, base = 10000) {
  return matrix(length, width, (n, i) => {
    const angle = n / base ** ((i - (i % 2)) / width);
    return i % 2 ? Math.cos(angle) : Math.sin(angle);
  });
}

/** r_n · r_m = Σ cos(ω (n − m)): by the distance alone. */
export function similarity(distance, width, base = 10000) {
  let sum = 0;
  for (let i = 0; i < width; i += 2) sum += Math.cos(distance / base ** (i / width));
  return sum;
}

// Attention as something else: positions as keys and queries make any fixed weights

/** log weights as scores: softmax gives them back, 0 becomes −∞. */
export function asScores(weights) {
  return weights.map((row) => row.map((x) => (x > 0 ? Math.log(x) : -Infinity)));
}

export function softmax(scores) {
  return scores.map((row) => {
    const largest = Math.max(...row);
    const some = row.map((x) => Math.exp(x - (largest === -Infinity ? 0 : largest)));
    const sum = Math.max(some.reduce((all, x) => all + x, 0), Number.MIN_VALUE);
    return some.map((x) => x / sum);
  });
}

/** A convolution with one value for each tap, beyond the ends 0: rows sum(kernel · x). */
export function convolution(x, kernel) {
  const middle = (kernel.length - 1) / 2;
  return x.map((_, n) => x[0].map((_, c) => kernel.reduce((sum, tap, t) => sum + tap * (x[n + t - middle]?.[c] ?? 0), 0)));
}

// Costs of a layer: regard.lab.cost.layers has the same formulas, counted while layers run

export const LAYERS = [
  ["attention, with projections", "4d² + 4d", "4nd² + 2n²d"],
  ["attention alone", "0", "2n²d"],
  ["attention in a window", "0", "2(n(2w+1) − w(w+1))d"],
  ["convolution", "kd² + d", "knd²"],
  ["depthwise convolution", "kd + d", "knd"],
  ["plain recurrence", "2d² + 2d", "2nd²"],
  ["GRU", "6d² + 6d", "6nd²"],
  ["LSTM", "8d² + 8d", "8nd²"],
  ["dense over all positions", "n²d² + nd", "n²d²"],
];

export function layerCost(name, { n, d, k, w }) {
  const near = Math.floor((k - 1) / 2);
  const reach = n === 1 ? 1 : near ? Math.ceil((n - 1) / near) : null;
  const around = Math.min(w, n - 1);
  const recurrent = (gates) => [2 * gates * d * d + 2 * gates * d, n * 2 * gates * d * d, n, n];
  switch (name) {
    case "attention, with projections": return cost([4 * d * d + 4 * d, 4 * n * d * d + 2 * n * n * d, 4, 3]);
    case "attention alone": return cost([0, 2 * n * n * d, 2, 1]);
    case "attention in a window": return cost([0, 2 * (n * (2 * around + 1) - around * (around + 1)) * d, 2, Math.max(1, Math.ceil((n - 1) / w))]);
    case "convolution": return cost([k * d * d + d, n * k * d * d, 1, reach]);
    case "depthwise convolution": return cost([k * d + d, n * k * d, 1, reach]);
    case "plain recurrence": return cost(recurrent(1));
    case "GRU": return cost(recurrent(3));
    case "LSTM": return cost(recurrent(4));
    case "dense over all positions": return cost([n * n * d * d + n * d, n * n * d * d, 1, 1]);
  }
  throw new RangeError(`layer (${name}) is unknown`);
}

function cost([parameters, multiplyAdds, steps, path]) {
  return { parameters, multiplyAdds, steps, path };
}

/** From which length on attention costs more: a·nd² + 2n²d = b·nd² at n = (b − a)·d/2. */
export function crossover(a, b, d) {
  return b > a ? ((b - a) * d) / 2 : null;
}

// Matrices as one types them

/** "1 2; 3 1/2" → [[1, 2], [3, 0.5]]; an Error says what is wrong. */
export function parse(text) {
  const rows = text.trim().split(/[;\n]+/).map((row) => row.trim()).filter(Boolean).map((row) => row.split(/[\s,]+/).filter(Boolean).map(number));
  if (!rows.length) throw new Error("there is no number");
  for (const row of rows) if (row.length !== rows[0].length) throw new Error(`rows have ${rows[0].length} and ${row.length} numbers; they must be equally long`);
  return rows;
}

export function number(word) {
  const text = word.replace("−", "-");
  const match = /^([-+]?)(?:(\d*\.?\d+(?:e[-+]?\d+)?)|√(\d+)|sqrt\((\d+)\))(?:\/(\d*\.?\d+))?$/i.exec(text);
  if (!match) throw new Error(`“${word}” is no number; write 1, −0.5, 1/3 or √2`);
  const size = match[2] !== undefined ? Number(match[2]) : Math.sqrt(Number(match[3] ?? match[4]));
  const value = size / (match[5] === undefined ? 1 : Number(match[5]));
  if (!Number.isFinite(value)) throw new Error(`“${word}” is no finite number`);
  return match[1] === "-" ? -value : value;
}

/** As it is typed again, in as few signs as give the same number. */
export function typed(a) {
  return a.map((row) => row.map(String).join(" ")).join("; ");
}

/** Numbers that look random and are the same everywhere: mulberry32. */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

export function normal(next) {
  return Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
}
