// The studio's frame: which page is shown, by the address after #, and the way between pages.

import { el } from "/view.js";
import { asking } from "/ui.js";

const GROUPS = [
  ["Attention", [["byhand", "By hand"], ["geometry", "Geometry"], ["as", "Attention as…"], ["positions", "Positions"], ["masks", "Masks and map"], ["cost", "Cost"]]],
  ["Your models", [["translate", "Translate"], ["text", "Text"], ["vision", "Vision"], ["read", "Read"], ["training", "Training"]]],
  ["The course", [["course", "Questions"]]],
];
const TITLES = Object.fromEntries(GROUPS.flatMap(([, pages]) => pages));

const menu = document.querySelector(".menu");
const links = document.getElementById("pages");
let current = null;
let visit = new AbortController();

function pageName() {
  const name = location.hash.slice(1).split("?")[0];
  return name in TITLES ? name : "byhand";
}

function navigation() {
  links.replaceChildren(...GROUPS.map(([title, pages]) =>
    el("div", { class: "group" }, el("h2", {}, title), el("ul", {}, pages.map(([name, label]) =>
      el("li", {}, el("a", { href: `#${name}`, "aria-current": name === current ? "page" : null }, label)))))));
}

/** Shows the page of the address. Each visit has an element of its own, so that a page that was left draws nowhere. */
async function show() {
  const name = pageName();
  visit.abort();
  visit = new AbortController();
  const { signal } = visit;
  const isOtherPage = current !== null && current !== name;
  current = name;
  delete document.body.dataset.ready;
  document.title = `${TITLES[name]} · Regard studio`;
  navigation();
  menu.setAttribute("aria-expanded", "false");
  document.body.classList.remove("open");
  const root = el("main", { id: "page", class: name, tabindex: "-1", "aria-live": "off" });
  document.getElementById("page").replaceWith(root);
  try {
    const page = await import(`/${name}.js`);
    if (signal.aborted) return;
    await page.show(root, asking(signal));
  } catch (error) {
    root.replaceChildren(el("p", { class: "wrong", role: "alert" }, `This page failed: ${error.message}`));
    throw error;
  }
  if (signal.aborted) return;
  if (isOtherPage) {
    root.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  document.body.dataset.ready = name;
}

menu.addEventListener("click", () => {
  const open = menu.getAttribute("aria-expanded") !== "true";
  menu.setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("open", open);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("page").focus();
});
addEventListener("hashchange", show);
show();
