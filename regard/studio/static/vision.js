import { el } from "/view.js";

export function show(root) {
  root.append(el("p", {}, "…"));
}
