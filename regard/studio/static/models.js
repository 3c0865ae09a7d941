// Shared by the pages of trained models: choosing a run, changing the model, asking it again.

import { button, card, el, lead, problem, select } from "/ui.js";
import { sign, wordNames } from "/view.js";

/** The runs that a page can show, and the command that makes one. */
export async function runsFor(ask, page) {
  const { runs, commands } = await ask("runs");
  return { ready: runs.filter((run) => run.page === page && run.ready), command: commands[page] };
}

export function nothingYet(title, words, command, made = "The quickest one is made in a minute or two:") {
  return [lead(title, words), el("section", { class: "offer" }, el("h2", {}, "No model yet"), el("p", {}, `This page looks into a trained model. ${made}`), el("p", {}, el("code", {}, command)), el("p", { class: "soft" }, "Then reload this page. A run of your own: ", el("code", {}, "regard studio RUN")))];
}

export function chooser(runs, state, set) {
  return select("run", "Model", state.run, runs.map((run) => [run.name, run.name]), (run) => set({ run }));
}

/**
 * Asks a question after a pause without changes, and one question at a time. `answer` receives the answer or the error,
 * and the question; an answer that a newer question has made obsolete is dropped.
 */
export function asker(ask, name, answer) {
  let timer = null;
  let next = null;
  let busy = false;
  async function send() {
    timer = null;
    if (busy) return;
    busy = true;
    const question = next;
    next = null;
    const result = await ask(name, question).then((data) => [data, null], (error) => [null, error]);
    busy = false;
    if (next === null) answer(...result, question);
    else if (timer === null) send();
  }
  return (question, wait = 0) => {
    next = question;
    clearTimeout(timer);
    timer = setTimeout(send, wait);
  };
}

/** The state of a view from the address, where everything is text. */
export function viewState(state) {
  const number = (text) => (text === "" ? undefined : ["mean", "rollout"].includes(text) ? text : Number(text));
  const chosen = { map: state.map || undefined, layer: number(state.layer), head: number(state.head), row: number(state.row), merge: state.merge, label: state.label, order: state.order || undefined };
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== undefined));
}

/** The state of a view for the address. */
export function addressState(next) {
  return Object.fromEntries(["map", "layer", "head", "row", "merge", "label", "order"].map((key) => [key, next[key] === undefined ? "" : String(next[key])]));
}

/** The address of By hand with the numbers of one head, under the present changes. */
export function byHand(chosen, state) {
  const { run, text, beams, off, beta, hidden, forced } = state;
  const parameters = { run, text, attention: chosen.map.layers[chosen.layer], head: String(chosen.head), beams, off, betas: beta, hidden, forced };
  return `byhand?${new URLSearchParams(Object.entries(parameters).filter(([, value]) => value))}`;
}

/** The parts of a text as buttons that hide them and show them again. */
export function hiding(map, state, change) {
  const merged = state.merge === "words" && map.columnWords;
  const hidden = new Set(list(state.hidden).map(([place]) => Number(place)));
  const parts = merged ? groups(map.columnWords) : map.columns.map((_, place) => [place]);
  const names = merged ? wordNames(map.columns, map.columnWords) : map.columns.map(sign);
  const hide = (places, all) => {
    for (const place of places) all ? hidden.delete(place) : hidden.add(place);
    change({ hidden: unlist([...hidden].sort((a, b) => a - b).map((place) => [String(place)])) });
  };
  return el("div", { class: "words", role: "group", "aria-label": "parts of the text" }, parts.map((places, n) => {
    const all = places.every((place) => hidden.has(place));
    return button(names[n], () => hide(places, all), { "data-key": `word-${places[0]}`, class: all ? "struck" : null, "aria-pressed": String(all), title: all ? "show it again" : "hide it" });
  }));
}

function groups(words) {
  const places = [];
  words.forEach((word, place) => { if (word >= 0) (places[word] ??= []).push(place); });
  return places;
}

// Lists in the address: "a~1,b~2"
export const list = (text) => (text ? text.split(",").map((item) => item.split("~")) : []);
export const unlist = (items) => items.map((item) => item.join("~")).join(",");

/** The changes inside a model as fields of a question. */
export function changes(state) {
  return {
    off: list(state.off).map(([name, head]) => [name, Number(head)]),
    beta: list(state.beta).map(([name, head, factor]) => [name, Number(head), Number(factor)]),
    hidden: list(state.hidden).map(([place]) => Number(place)),
    forced: list(state.forced).map(([token]) => Number(token)),
  };
}

/** Controls of the chosen head: off, β; `own` are buttons for a single head, `more` for every selection. */
export function headTools(chosen, state, change, more = [], own = []) {
  if (typeof chosen.head !== "number") return el("div", { class: "controls" }, el("span", { class: "soft" }, "Choose a single head to switch it off or to change its β."), more);
  const name = chosen.map.layers[chosen.layer];
  const head = String(chosen.head);
  const offs = list(state.off);
  const betas = list(state.beta);
  const isOff = offs.some(([other, h]) => other === name && h === head);
  const factor = Number(betas.find(([other, h]) => other === name && h === head)?.[2] ?? 1);
  const setFactor = (x) => change({ beta: unlist([...betas.filter(([other, h]) => other !== name || h !== head), ...(x === 1 ? [] : [[name, head, String(x)]])]) });
  const input = el("input", { type: "range", min: 0, max: 4, step: 0.1, "data-key": "head-beta", "aria-label": "β of this head, times", "aria-valuetext": `${factor} times`, oninput: ({ target }) => { target.nextElementSibling.value = target.value; }, onchange: (event) => setFactor(Number(event.target.value)), value: factor });
  return el("div", { class: "controls" },
    button(isOff ? "Head is off" : "Switch this head off", () => change({ off: unlist(isOff ? offs.filter(([other, h]) => other !== name || h !== head) : [...offs, [name, head]]) }), { "aria-pressed": String(isOff), "data-key": "head-off" }),
    el("label", { class: "toggle" }, "β × ", input, el("output", {}, String(factor))), own, more);
}

export function changeSummary(state, change, keys = { off: "", beta: "", hidden: "" }) {
  const words = [];
  for (const [name, head] of list(state.off)) words.push(`${short(name)}, head ${Number(head) + 1} is off`);
  for (const [name, head, factor] of list(state.beta)) words.push(`${short(name)}, head ${Number(head) + 1} has β × ${factor}`);
  if (state.hidden) words.push(`${list(state.hidden).length} hidden`);
  if (state.forced) words.push("the beginning is forced");
  if (!words.length) return null;
  return el("p", { class: "controls" }, el("span", { class: "soft" }, `Changed: ${words.join("; ")}.`), button("Undo all", () => change(keys), { class: "mini" }));
}

function short(name) {
  const match = /^(encoder|decoder)\.blocks\.(\d+)\.(attention|cross)$/.exec(name);
  if (!match) return name;
  return `${match[3] === "cross" ? "cross-attention" : match[1]} layer ${Number(match[2]) + 1}`;
}

export { card, problem };
