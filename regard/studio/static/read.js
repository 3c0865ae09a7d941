// Read: the cross-attention of a reader, character by character.

import { el } from "/ui.js";
import { tokens } from "/view.js";
import { showPictures } from "/picture.js";

export function show(root, ask) {
  return showPictures(root, ask, "read", {
    title: "Read",
    about: "An image read as text. Below, for each character, where the decoder looked; draw a strip of your own and have it read.",
    question: "read",
    kind: "strip",
    result: {
      title: "What it says",
      show: (view, whole) => [
        el("p", { class: "answer", "data-fact": "text", "aria-live": "polite" }, view.text || "∅"),
        whole && whole.text !== view.text ? el("p", { class: "before" }, `Without changes: ${whole.text}`) : null,
        tokens(view.tokens),
      ],
    },
  });
}
