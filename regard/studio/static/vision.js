// Vision: the attention of an image classifier's patches, and their effect.

import { el, figure } from "/ui.js";
import { labels } from "/view.js";
import { showPictures } from "/picture.js";

export function show(root, ask) {
  return showPictures(root, ask, "vision", {
    title: "Vision",
    about: "An image as patches. Click one to see where it looks, layer by layer and head by head, or hide it and see what the model says.",
    question: "classify",
    kind: "digit",
    result: {
      title: "What it is",
      show: (view, whole) => [
        el("p", { class: "answer", "data-fact": "label", "aria-live": "polite" }, view.text),
        whole && whole.text !== view.text ? el("p", { class: "before" }, `Without changes: ${whole.text}, p = ${figure(whole.labels[0][1], 3)}`) : null,
        labels(view.labels),
      ],
    },
  });
}
