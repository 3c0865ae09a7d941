// Compares the studio's arithmetic with Python's: every number to 1e-12, relative where it is large.

const number = (x) => (x === "inf" ? Infinity : x === "-inf" ? -Infinity : x);

export function compare(core, view, golden, presets) {
  let checked = 0;
  let worst = 0;
  const wrong = [];
  const close = (what, found, expected) => {
    if (Array.isArray(expected)) {
      if (found.length !== expected.length) wrong.push(`${what}: ${found.length} numbers, not ${expected.length}`);
      expected.forEach((x, n) => close(`${what}[${n}]`, found[n], x));
      return;
    }
    checked++;
    const [one, other] = [found, number(expected)];
    if (one === other) return;
    const gap = Math.abs(one - other) / Math.max(1, Math.abs(other));
    worst = Math.max(worst, gap);
    if (!(gap <= 1e-12)) wrong.push(`${what}: ${one}, not ${other}`);
  };
  golden.attention.forEach((one, n) => {
    const beta = number(one.beta);
    const found = core.attention(...one.inputs, { beta, allowed: one.allowed });
    for (const name of ["scores", "scaled", "masked", "exponentials", "weights", "output"]) close(`attention ${n} ${name}`, found[name], one[name]);
    const [q, k, v] = one.inputs;
    const counted = core.operations(q.length, k.length, k[0].length, v[0].length, { beta, masked: Boolean(one.allowed) });
    for (const [name, expected] of Object.entries(one.operations)) close(`operations ${n} ${name}`, counted[name], expected);
  });
  golden.movedKey.forEach((one, n) => {
    const found = core.movedKey(one.query, one.key, one.value, 2, one.move);
    close(`moved ${n} weight`, found.weight, one.weight);
    close(`moved ${n} after`, found.after.output, one.output);
    close(`moved ${n} linear`, found.linear, one.linear);
    close(`moved ${n} others`, found.others, one.others);
  });
  golden.sinusoidal.forEach((one, n) => {
    const rows = core.sinusoidal(one.length, one.width, one.base);
    close(`sinusoidal ${n}`, rows, one.rows);
    if (one.width % 2 === 0) close(`similarity ${n}`, core.similarity(3, one.width, one.base), one.rows[5].reduce((sum, x, i) => sum + x * one.rows[2][i], 0));
  });
  for (const one of golden.layers) {
    const found = core.layerCost(one.name, one.sizes);
    for (const name of ["parameters", "multiplyAdds", "steps", "path"]) close(`${one.name} ${name}`, found[name], one[name]);
  }
  close("words", view.byWords(golden.byWords.weights, golden.byWords.rows, golden.byWords.columns), golden.byWords.merged);
  close("rollout", view.rollout(golden.rollout.layers), golden.rollout.whole);
  const exercise = presets.exercise3[1];
  close("exercise 3", [exercise.q, exercise.k, exercise.v].map(core.parse), golden.exercise3);
  close("typed", core.parse("1/4 √2 -3; −0.5 1e-3 sqrt(9)/2"), [[0.25, Math.SQRT2, -3], [-0.5, 0.001, 1.5]]);
  return { checked, worst, wrong };
}
