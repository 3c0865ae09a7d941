// Text: the attention and the answer of a language model or a text classifier.

import { button, card, el, figure, lead, live, problem, text } from "/ui.js";
import { effects, labels, mount, tokens } from "/view.js";
import { asker, byHand, changeSummary, changes, chooser, headTools, hiding, addressState, nothingYet, runsFor, viewState } from "/models.js";

const DEFAULTS = { run: "", text: "A dog runs on the", off: "", beta: "", hidden: "", map: "", layer: "", head: "", row: "", merge: "tokens", label: "written", order: "" };
const NONE = { off: "", beta: "", hidden: "" };
const ABOUT = "Type a text. A language model says what comes next, a text classifier which label it is; hide words or switch heads off, and it answers again.";

export async function show(root, ask) {
  const { ready, command } = await runsFor(ask, "text");
  if (!ready.length) return void root.replaceChildren(...nothingYet("Text", ABOUT, command, "A language model of a text of your own:"));
  let view = null;
  let plain = null;
  let trouble = null;
  let busy = true;
  const page = live(root, "text", DEFAULTS, draw, (state) => { state.run ||= ready[0].name; });
  const key = (state) => JSON.stringify([state.run, state.text]);
  const edited = (state) => Boolean(state.off || state.beta || state.hidden);

  const request = asker(ask, "text", (answer, error) => {
    busy = false;
    trouble = error;
    if (answer) {
      view = answer;
      if (!edited(page.state)) plain = { ...answer, key: key(page.state) };
    }
    page.render();
  });
  const compare = asker(ask, "text", (answer, error, question) => {
    if (answer) plain = { ...answer, key: key(question) };
    page.render();
  });

  function again(state, wait = 0, effect = false) {
    if (!state.text.trim()) return;
    busy = true;
    const { run, text: source } = state;
    request({ run, text: source, ...changes(state), effect }, wait);
    if (edited(state) && plain?.key !== key(state)) compare({ run, text: source }, wait);
  }

  function change(delta, wait = 0) {
    const next = { ...page.state, ...delta };
    page.set(delta);
    again(next, wait);
  }

  again(page.state);

  function draw(state) {
    return [
      lead("Text", ABOUT),
      card(null,
        el("div", { class: "columns" },
          text("text", "Text", state.text, (value) => change({ text: value, ...NONE, row: "" }, 250), { rows: 2 }),
          el("div", { class: "controls" }, chooser(ready, state, (delta) => change({ ...delta, ...NONE, map: "", layer: "", head: "", row: "" })))),
        trouble ? problem(trouble) : null,
        view ? outcome(state) : trouble ? null : el("p", { class: "soft", "aria-busy": "true" }, "The model is being read …")),
      view ? el("div", { class: busy ? "busy" : null }, viewer(state)) : null,
      view?.effect ? effects(view.effect) : null,
    ];
  }

  const writes = () => view.tokens.length > 0;

  function outcome(state) {
    const map = view.maps[0];
    return [
      map.overview ? null : [el("p", { class: "note" }, "Click a part of the text to hide it from all attention."), hiding(map, state, change)],
      el("div", { class: "columns" },
        el("div", {},
          el("h3", {}, writes() ? "How it goes on" : view.answers),
          el("p", { class: "answer", "data-fact": "output", "aria-live": "polite" }, view.text ? (writes() ? `… ${view.text.trim()}` : view.text) : "∅"),
          before(state), changeSummary(state, change, NONE),
          writes() ? [el("h3", {}, "How likely each token was"), tokens(view.tokens)] : null),
        el("div", {}, el("h3", {}, writes() ? view.answers : "Probabilities"), writes() ? next() : labels(view.labels))),
    ];
  }

  /** The answer without changes, and the change of its probability. */
  function before(state) {
    if (!edited(state) || plain?.key !== key(state)) return writes() ? el("p", { class: "before" }, `log p of the text ${figure(view.logP, 2)}`) : null;
    if (writes()) return el("p", { class: "before" }, plain.text === view.text ? "Unchanged" : `Without changes: … ${plain.text.trim()}`, `; log p of the text ${figure(view.logP, 2)}, without changes ${figure(plain.logP, 2)}.`);
    const [name, p] = plain.labels[0];
    const now = view.labels.find(([label]) => label === name)[1];
    return el("p", { class: "before" }, `Without changes: ${name}, p = ${figure(p, 4)}; now ${figure(now, 4)}.`);
  }

  /** The likeliest next tokens; a click appends one, and the model continues from there. */
  function next() {
    return labels(view.labels, (name, n) => button(name, () => change({ text: view.continued[n], ...NONE, row: "" }), { class: "link", "data-key": `next-${n}`, title: "write it" }));
  }

  function viewer(state) {
    const box = el("div");
    mount(box, { ...view, effect: null }, {
      plain: true,
      state: viewState(state),
      onstate: (chosen) => page.set(addressState(chosen)),
      tools: (chosen) => headTools(chosen, state, change,
        [view.effect || view.maps[0].overview ? null : button("Find what each head and word does", () => { again(state, 0, true); page.render(); }, { "data-key": "effects" })],
        [button("Open this head in By hand", () => { location.hash = byHand(chosen, state); }, { "data-key": "to-byhand" })]),
    });
    return box;
  }
}
