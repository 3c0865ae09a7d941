// The studio's frame: which page is shown, by the address after #, and the way between pages.

import { el } from "/view.js";

const GROUPS = [
  ["Attention", [["byhand", "By hand"], ["geometry", "Geometry"], ["as", "Attention as…"], ["positions", "Positions"], ["masks", "Masks and map"], ["cost", "Cost"]]],
  ["Your models", [["translate", "Translate"], ["text", "Text"], ["vision", "Vision"], ["read", "Read"], ["training", "Training"]]],
  ["The course", [["course", "Questions"]]],
];
const TITLES = Object.fromEntries(GROUPS.flatMap(([, pages]) => pages));

const root = document.getElementById("page");
const menu = document.querySelector(".menu");
const links = document.getElementById("pages");
let current = null;
let leave = null;

function named() {
  const name = location.hash.slice(1).split("?")[0];
  return name in TITLES ? name : "byhand";
}

function navigation() {
  links.replaceChildren(...GROUPS.map(([title, pages]) =>
    el("div", { class: "group" }, el("h2", {}, title), el("ul", {}, pages.map(([name, label]) =>
      el("li", {}, el("a", { href: `#${name}`, "aria-current": name === current ? "page" : null }, label)))))));
}

async function show() {
  const name = named();
  leave?.();
  leave = null;
  const changed = current !== null && current !== name;
  current = name;
  document.title = `${TITLES[name]} · Regard studio`;
  navigation();
  menu.setAttribute("aria-expanded", "false");
  document.body.classList.remove("open");
  try {
    const page = await import(`/${name}.js`);
    if (current !== name) return;
    root.className = name;
    root.replaceChildren();
    leave = (await page.show(root)) ?? null;
  } catch (error) {
    root.replaceChildren(el("p", { class: "wrong", role: "alert" }, `This page failed: ${error.message}`));
    throw error;
  }
  if (changed) {
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
  root.focus();
});
addEventListener("hashchange", show);
show();
