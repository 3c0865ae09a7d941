// The course, document by document: questions, model answers that run, and wrong answers to try.

import { button, card, el, lead, live, problem } from "/ui.js";

const DEFAULTS = { document: "exercises", open: "" };

export async function show(root, ask) {
  const documents = await ask("course");
  const results = new Map();
  const waiting = new Set();
  document.head.append(...["report.css", "answers.css"].filter((name) => !document.querySelector(`link[href="/${name}"]`)).map((name) => el("link", { rel: "stylesheet", href: `/${name}` })));
  const page = live(root, "course", DEFAULTS, draw);
  if (page.state.open) run(page.state.document, page.state.open);

  // Wrong answers that were tried stay visible.
  function tries(name, section, n) {
    const key = JSON.stringify([name, section, n]);
    return results.has(key) || waiting.has(key);
  }

  async function run(name, section, mistake) {
    const key = JSON.stringify([name, section, mistake ?? null]);
    if (waiting.has(key)) return;
    waiting.add(key);
    page.render();
    try {
      results.set(key, await ask("answer", { document: name, section, ...(mistake === undefined ? {} : { mistake }) }));
    } catch (error) { results.set(key, { error }); }
    waiting.delete(key);
    page.render();
  }

  function draw(state, set) {
    const chosen = documents.find((each) => each.document === state.document) ?? documents[0];
    return [
      lead("The course, question by question", "Think first. Then see the model answer, run what proves it, and try the wrong answers that people give."),
      el("div", { class: "toolbar" }, el("div", { class: "choice", role: "group", "aria-label": "Document" }, documents.map((each) => button(each.title, () => set({ document: each.document, open: "" }), { "aria-pressed": String(each === chosen), "data-key": `document-${each.document}` })))),
      card(`${chosen.questions.length} questions`, chosen.questions.map((question) => entry(chosen, question, state, set))),
    ];
  }

  function entry(chosen, question, state, set) {
    const key = JSON.stringify([chosen.document, question.section, null]);
    const result = results.get(key);
    const busy = waiting.has(key);
    return el("article", { class: "question", "data-field": `${chosen.document}-${question.section}` },
      el("h3", {}, question.section, el("span", { class: "soft" }, ` · ${question.about} · ${question.marks} ${question.marks === 1 ? "point" : "points"}`)),
      htmlElement("q", question.question),
      el("p", { class: "controls" },
        button(busy ? "Running …" : result ? "Run it again" : "Answer and run it", () => { set({ open: question.section }); results.delete(key); run(chosen.document, question.section); }, { disabled: busy, "data-key": `run-${question.section}` }),
        result ? button("Hide", () => { results.delete(key); set({ open: "" }); page.render(); }, { class: "mini" }) : null,
        result && !result.error ? el("span", { class: result.stands ? "good" : "wrong", "data-fact": "verdict" }, result.stands ? "✓ stands" : "✗ fails") : null),
      result ? (result.error ? problem(result.error) : htmlElement("regard-lab", result.html)) : null,
      question.mistakes.length ? el("details", { "data-key": `wrong-${question.section}`, open: question.mistakes.some((_, n) => tries(chosen.document, question.section, n)) }, el("summary", {}, `${question.mistakes.length} wrong ${question.mistakes.length === 1 ? "answer" : "answers"} to try`),
        question.mistakes.map((mistake, n) => {
          const mine = JSON.stringify([chosen.document, question.section, n]);
          const tried = results.get(mine);
          return el("div", {}, htmlElement("q", mistake), button(waiting.has(mine) ? "Running …" : "Try it", () => run(chosen.document, question.section, n), { class: "mini", disabled: waiting.has(mine), "data-key": `try-${question.section}-${n}` }), tried ? (tried.error ? problem(tried.error) : htmlElement("regard-lab", tried.html)) : null);
        })) : null);
  }
}

/** HTML written by the lab: text, MathML and SVG; a script in it would not run. */
function htmlElement(kind, html) {
  const read = new DOMParser().parseFromString(html, "text/html");
  return el("div", { class: kind }, [...read.body.childNodes].map((node) => document.importNode(node, true)));
}
