// Training: curves of runs, live while they train, from their metrics.jsonl.

import { card, chart, el, figure, lead, live, problem, select, toggle } from "/ui.js";

const DEFAULTS = { runs: "", x: "step", smooth: 0.6, logs: false };
const NAMES = { loss: "training loss", validation_loss: "validation loss", characters_right: "characters right", compression: "compression", bits_per_byte: "bits per byte", perplexity: "perplexity", accuracy: "accuracy", exact_match: "exact match", bleu: "BLEU", chrf: "chrF", lr: "learning rate", norm: "gradient norm", speed: "tokens a second" };
const EVERY = 1500;

export async function show(root, ask) {
  const { runs } = await ask("runs");
  const trained = runs.filter((run) => run.training);
  if (!trained.length) {
    return void root.replaceChildren(lead("Training", "Curves of runs, while they train and afterwards."), el("section", { class: "offer" }, el("h2", {}, "No run yet"), el("p", {}, "Train one, and open it here while it learns:"), el("p", {}, el("code", {}, "regard demo dates"))));
  }
  const data = new Map();
  let trouble = null;
  const defaults = { ...DEFAULTS, runs: trained.slice(0, 1).map((run) => run.name).join(",") };
  const page = live(root, "training", defaults, draw);

  async function poll() {
    const chosen = page.state.runs.split(",").filter(Boolean);
    try {
      const answer = await ask("training", { runs: Object.fromEntries(chosen.map((name) => [name, data.get(name)?.end ?? 0])) });
      let news = false;
      for (const [name, { lines, begin, end }] of Object.entries(answer)) {
        const before = begin === 0 ? [] : (data.get(name)?.lines ?? []);
        if (lines.length || !data.has(name)) {
          news = true;
          data.set(name, { lines: [...before, ...lines], end, at: lines.length && data.has(name) ? Date.now() : 0 });
        }
      }
      if (news || trouble) { trouble = null; page.render(); }
    } catch (error) {
      if (String(trouble) !== String(error)) { trouble = error; page.render(); }
    }
    setTimeout(poll, EVERY);
  }
  poll();

  function draw(state, set) {
    const chosen = state.runs.split(",").filter((name) => data.has(name));
    const flip = (name) => {
      const names = new Set(state.runs.split(",").filter(Boolean));
      names.has(name) ? names.delete(name) : names.add(name);
      set({ runs: [...names].join(",") });
    };
    return [
      lead("Training", "Curves of runs, read from their metrics while they train; several side by side."),
      card(null, el("div", { class: "controls" }, trained.map((run) => toggle(`run-${run.name}`, run.name, state.runs.split(",").includes(run.name), () => flip(run.name)))),
        el("div", { class: "controls" }, select("x", "Against", state.x, [["step", "steps"], ["seconds", "seconds"]], (x) => set({ x })), select("smooth", "Smoothed", String(state.smooth), [["0", "not at all"], ["0.6", "a little"], ["0.9", "much"]], (smooth) => set({ smooth: Number(smooth) })), toggle("logs", "logarithmic", state.logs, (logs) => set({ logs }))),
        trouble ? problem(trouble) : null),
      chosen.length ? [el("div", { class: "columns" }, charts(chosen, state)), card("Where they are", summary(chosen))] : el("p", { class: "soft", "aria-busy": "true" }, "Reading …"),
    ];
  }

  function charts(chosen, state) {
    const keys = new Set(chosen.flatMap((name) => data.get(name).lines.flatMap((line) => Object.keys(line))));
    for (const key of ["step", "epoch", "seconds"]) keys.delete(key);
    const order = [...keys].sort((a, b) => Object.keys(NAMES).indexOf(a) - Object.keys(NAMES).indexOf(b)).filter((key) => chosen.some((name) => data.get(name).lines.some((line) => typeof line[key] === "number")));
    return order.map((key) => {
      const curves = chosen.flatMap((name, n) => {
        let seconds = 0;
        const points = [];
        for (const line of data.get(name).lines) {
          seconds = line.seconds ?? seconds;
          if (typeof line[key] === "number") points.push([state.x === "step" ? line.step : seconds, line[key]]);
        }
        const [x, y] = [points.map(([u]) => u), points.map(([, v]) => v)];
        const rough = key === "loss" || key === "norm" || key === "speed";
        if (!rough || !state.smooth || points.length < 8) return [{ name, x, y, colour: n }];
        return [{ name: `${name}, as measured`, x, y, colour: n, faint: true }, { name, x, y: movingAverage(y, state.smooth), colour: n }];
      });
      return card(NAMES[key] ?? key, chart("", curves, { x: state.x === "step" ? "step" : "seconds", y: "", logY: state.logs, width: 440, height: 250, points: !["loss", "lr", "norm", "speed"].includes(key) }));
    });
  }

  function summary(chosen) {
    return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["run", "step", "of", "loss", "best score", ""].map((name, n) => (name ? el("th", { scope: "col", class: n ? "n" : null }, name) : el("td"))))),
      el("tbody", {}, chosen.map((name) => {
        const { lines, at } = data.get(name);
        const last = lines.findLast((line) => "loss" in line) ?? {};
        const score = ["bleu", "exact_match", "accuracy", "characters_right", "compression"].find((key) => lines.some((line) => key in line));
        const scores = lines.filter((line) => score in line).map((line) => line[score]);
        const best = scores.length ? Math.max(...scores) : null;
        const live = at && Date.now() - at < 20_000;
        return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "n", "data-fact": `step-${name}` }, String(last.step ?? "")), el("td", { class: "n" }, String(trained.find((run) => run.name === name)?.steps ?? "")), el("td", { class: "n" }, last.loss === undefined ? "" : figure(last.loss, 3)), el("td", { class: "n" }, best === null ? "" : `${NAMES[score] ?? score} ${figure(best, 3)}`), el("td", {}, live ? el("span", { class: "good" }, "● training") : ""));
      }))));
  }
}

function movingAverage(values, share) {
  let level = values[0];
  return values.map((x) => (level = share * level + (1 - share) * x));
}
