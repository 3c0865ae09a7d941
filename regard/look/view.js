// The attention of a model: a grid of layers × heads, the weights of one head, pictures, effects.
//
//   mount(root, view, options)     draws a view, as View.to_json writes it, into an element
//
// One module without imports, so that a page can hold it inside itself. Colours come from view.css.

const SVG = "http://www.w3.org/2000/svg";

const attributesOf = new WeakMap(); // an element's attributes as the page last drew them
const contentsOf = new WeakMap(); // how to build the content of folded details

/** An element with attributes, listeners (onclick) and children; text is never parsed as HTML. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element[name] = (event) => void value(event); // a handler that returns false would cancel the event
    else if (name === "style") for (const [key, text] of Object.entries(value)) key.startsWith("--") ? element.style.setProperty(key, text) : (element.style[key] = text);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...nodes(children));
  attributesOf.set(element, attributes);
  return element;
}

/** Children as nodes. An absent child (null, false) keeps its place as a comment, so that its siblings keep theirs. */
function nodes(children) {
  return [children].flat(Infinity).map((child) =>
    child instanceof Node ? child : child === null || child === undefined || child === false ? document.createComment("") : document.createTextNode(child));
}

/**
 * Gives `parent` these children by updating those that it has, so that focus, selections, drags, compositions, scroll
 * positions and open details survive. Children match by their order, their tag and their data-key.
 */
export function morph(parent, children) {
  const [old, fresh] = [[...parent.childNodes], nodes(children)];
  const shorter = Math.min(old.length, fresh.length);
  let head = 0;
  while (head < shorter && matches(old[head], fresh[head])) head++;
  let tail = 0;
  while (tail < shorter - head && matches(old.at(-1 - tail), fresh.at(-1 - tail))) tail++;
  const removed = new Set(old);
  let next = null;
  for (let n = fresh.length - 1; n >= 0; n--) {
    const inTail = n >= fresh.length - tail;
    const match = inTail ? old[n + old.length - fresh.length] : n < old.length - tail ? old[n] : null;
    if (match && matches(match, fresh[n])) {
      update(match, fresh[n]);
      removed.delete(match);
      next = match;
    } else {
      parent.insertBefore(fresh[n], next);
      next = fresh[n];
    }
  }
  for (const node of removed) node.remove();
}

function matches(old, fresh) {
  return old.nodeName === fresh.nodeName && old.dataset?.key === fresh.dataset?.key && old.dataset?.field === fresh.dataset?.field;
}

function update(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const [before, now] = [attributesOf.get(old) ?? {}, attributesOf.get(fresh) ?? {}];
  attributesOf.set(old, now);
  const details = old.localName === "details";
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !(details && name === "open")) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) === value || (details && name === "open")) continue;
    if (name === "style") old.style.cssText = fresh.style.cssText; // the content security policy forbids the attribute
    else old.setAttribute(name, value);
  }
  for (const name of Object.keys({ ...before, ...now })) if (name.startsWith("on")) old[name] = fresh[name];
  if (details) {
    if (Boolean(now.open) !== Boolean(before.open)) old.open = fresh.open;
    if (contentsOf.has(fresh)) contentsOf.set(old, contentsOf.get(fresh));
    if (old.open) unfold(fresh);
  }
  morph(old, [...fresh.childNodes]);
  switch (old.localName) {
    case "canvas":
      [old.width, old.height] = [fresh.width, fresh.height]; // which clears it
      old.getContext("2d").drawImage(fresh, 0, 0);
      break;
    case "select":
      if (old.value !== fresh.value) old.value = fresh.value;
      break;
    case "input":
      old.checked = fresh.checked; // and the value, below
    case "textarea":
      // Only a new value is written: it would move the cursor, end a composition and empty the undo history.
      if (now.value !== before.value && old.value !== fresh.value) old.value = fresh.value;
  }
}

/** Details whose content is built when they are opened, and again on each update while they are open. */
export function fold(summary, build) {
  const details = el("details", { class: "numbers", ontoggle: (event) => event.currentTarget.open && unfold(event.currentTarget) }, el("summary", {}, summary));
  contentsOf.set(details, build);
  return details;
}

function unfold(details) {
  if (contentsOf.has(details) && details.children.length === 1) details.append(...nodes(contentsOf.get(details)()));
}

/** A number as short text: 0.028, 3.1e-5, −∞. */
export function figure(x, digits = 3) {
  if (x === Infinity) return "∞";
  if (x === -Infinity) return "−∞";
  if (Number.isNaN(x)) return "NaN";
  const size = Math.abs(x);
  if (size !== 0 && size < 0.5 * 10 ** -digits) return x.toExponential(1).replaceAll("-", "−");
  const text = size >= 1e6 ? x.toExponential(2) : x.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** A token as text; spaces and ends have a sign. */
export function sign(piece) {
  return { "▁": "␣", "</s>": "∎", "<s>": "⊢", " ": "␣", "\n": "⏎" }[piece] ?? piece.replaceAll("▁", " ").trim();
}

const bytesOf = new WeakMap();

/** The weights of a map: unpack(map)(layer, head) is a matrix of rows. */
export function unpack(map) {
  if (!bytesOf.has(map)) bytesOf.set(map, Uint8Array.from(atob(map.weights), (byte) => byte.charCodeAt(0)));
  const bytes = bytesOf.get(map);
  const [layers, heads, L, S] = map.shape;
  return (layer, head) => {
    if (layer >= layers || head >= heads) throw new RangeError(`no head ${head} in layer ${layer}`);
    let n = 2 * (layer * heads + head) * L * S;
    return Array.from({ length: L }, () => {
      const row = new Array(S);
      for (let j = 0; j < S; j++, n += 2) row[j] = (bytes[n] + 256 * bytes[n + 1]) / 65535;
      return row;
    });
  };
}

export function mean(matrices) {
  return matrices[0].map((first, i) => {
    const row = new Array(first.length).fill(0);
    for (const matrix of matrices) for (let j = 0; j < row.length; j++) row[j] += matrix[i][j];
    return row.map((sum) => sum / matrices.length);
  });
}

/** Weights between words: summed over a key's pieces, averaged over a query's, as in look/heads.py. */
export function byWords(matrix, rowWords, columnWords) {
  const rows = Math.max(-1, ...rowWords) + 1;
  const columns = Math.max(-1, ...columnWords) + 1;
  const out = Array.from({ length: rows }, () => new Array(columns).fill(0));
  const counts = new Array(rows).fill(0);
  for (const word of rowWords) if (word >= 0) counts[word]++;
  matrix.forEach((row, i) => {
    if (rowWords[i] < 0) return;
    row.forEach((x, j) => {
      if (columnWords[j] >= 0) out[rowWords[i]][columnWords[j]] += x / counts[rowWords[i]];
    });
  });
  return out;
}

/** Attention rollout, Π (½ mean A + ½ I) over layers, as in look/rollout.py. */
export function rollout(layers) {
  const n = layers[0].length;
  let whole = layers[0].map((_, i) => layers[0].map((_, j) => Number(i === j)));
  for (const weights of layers) {
    const mixed = weights.map((row, i) => row.map((x, j) => (x + Number(i === j)) / 2));
    whole = mixed.map((row) => Array.from({ length: n }, (_, j) => row.reduce((sum, x, k) => sum + x * whole[k][j], 0)));
  }
  return whole;
}

/** The names of words from their pieces and the word number of each piece. */
export function wordNames(pieces, words) {
  const names = [];
  words.forEach((word, i) => {
    if (word >= 0) names[word] = (names[word] ?? "") + pieces[i].replaceAll("▁", " ");
  });
  return names.map((name) => sign((name ?? "").trim()));
}

/** A heat map of cells from 0 to 1. `signed` shows negative cells in another hue and scales by the largest. */
export function heat(matrix, rows, columns, { label, selected, onselect, cell = 0, signed = false } = {}) {
  const L = matrix.length;
  const S = columns.length;
  const largest = signed ? Math.max(1e-9, ...matrix.flat().map(Math.abs)) : 1;
  if (L * S > 5000) return dense(matrix, label, largest);
  const side = cell || Math.max(14, Math.min(34, Math.floor(680 / Math.max(S, 1))));
  const narrow = columns.every((name) => [...name].length <= 2) || side > 30 && columns.every((name) => [...name].length <= 4);
  const left = 12 + 7.2 * Math.max(1, ...rows.map((name) => width(name)));
  const top = narrow ? 22 : 12 + 6.4 * Math.max(1, ...columns.map((name) => width(name)));
  const wide = left + S * side + 8;
  const tall = top + L * side + 6;
  const picture = svg("svg", { class: "heat", viewBox: `0 0 ${wide} ${tall}`, width: wide, height: tall, role: "img", "aria-label": label });
  columns.forEach((name, j) => {
    const x = left + (j + 0.5) * side;
    picture.append(
      narrow
        ? svg("text", { x, y: top - 7, class: "name", "text-anchor": "middle" }, name)
        : svg("text", { x: 0, y: 0, class: "name", transform: `translate(${x + 4} ${top - 6}) rotate(-90)` }, name),
    );
  });
  matrix.forEach((row, i) => {
    const y = top + i * side;
    picture.append(svg("text", { x: left - 8, y: y + side / 2 + 4, class: selected === i ? "name chosen" : "name", "text-anchor": "end" }, rows[i]));
    row.forEach((x, j) => {
      picture.append(svg(
        "rect",
        {
          x: left + j * side, y, width: side - 1, height: side - 1, rx: 2,
          class: x < 0 ? "cell minus" : "cell",
          "fill-opacity": Math.max(0.035, Math.min(1, Math.abs(x) / largest)).toFixed(3),
          onclick: onselect && (() => onselect(i, j)),
        },
        svg("title", {}, `${rows[i]} → ${columns[j]}: ${figure(x, 4)}`),
      ));
    });
    picture.append(...nodes(selected === i && svg("rect", { x: left - 2, y: y - 1.5, width: S * side + 3, height: side + 2, rx: 4, class: "frame" })));
  });
  // Arrow keys select the next row.
  const walk = onselect && ((event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    onselect(Math.min(Math.max(0, selected === undefined ? 0 : selected + move), L - 1));
  });
  return el("div", { class: "scroll", tabindex: "0", role: "group", "data-key": onselect && "heat", "aria-label": onselect ? `${label}; arrow keys choose a row` : label, onkeydown: walk }, picture);
}

function width(text) {
  return [...text].reduce((sum, letter) => sum + (letter.codePointAt(0) > 0x1100 ? 1.7 : 1), 0);
}

/** A heat map of many cells, on a canvas. */
function dense(matrix, label, largest = 1, size = 560) {
  const canvas = el("canvas", { class: "dense", role: "img", "aria-label": label });
  paint(canvas, matrix, largest);
  canvas.style.width = `min(100%, ${size}px)`;
  return canvas;
}

const PLUS = [126, 77, 214];
const MINUS = [224, 120, 30];

/** Paints weights as pixels, one for each cell; CSS scales them. */
export function paint(canvas, matrix, largest = 1) {
  const L = matrix.length;
  const S = matrix[0]?.length ?? 0;
  canvas.width = Math.max(1, S);
  canvas.height = Math.max(1, L);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const { data } = image;
  let n = 0;
  for (const row of matrix) for (const x of row) {
    // The hue is the same in light and dark; the strength is in the opacity.
    [data[n], data[n + 1], data[n + 2]] = x < 0 ? MINUS : PLUS;
    data[n + 3] = (255 * Math.abs(x)) / largest;
    n += 4;
  }
  context.putImageData(image, 0, 0);
}

/** A folded table with the numbers of a picture. */
export function numbers(matrix, rows, columns, summary = "The same as a table") {
  return fold(summary, () =>
    el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": summary },
      el("table", {},
        el("thead", {}, el("tr", {}, el("td"), columns.map((name) => el("th", { scope: "col", class: "n" }, name)))),
        el("tbody", {}, matrix.slice(0, 200).map((row, i) =>
          el("tr", {}, el("th", { scope: "row" }, rows[i]), row.slice(0, 200).map((x) => el("td", { class: "n" }, figure(x)))))))));
}

/** A group of buttons with one pressed. */
export function choice(label, options, value, onpick) {
  return el("div", { class: "choice", role: "group", "aria-label": label },
    options.map(([key, name]) =>
      el("button", { type: "button", "aria-pressed": String(key === value), onclick: () => onpick(key) }, name)));
}

export const TITLES = { encoder: "Encoder", decoder: "Decoder", cross: "Cross-attention" };

/** A picture whose patches are shaded by their weights. */
export function overlay(picture, weights, { size = 260, selected, onpick, hidden = new Set(), label = "Weights over the picture" } = {}) {
  const scale = Math.max(1, Math.min(size / picture.width, (0.9 * size) / picture.height, 40));
  const [wide, tall] = [picture.width * scale, picture.height * scale];
  const [w, h] = [wide / picture.columns, tall / picture.rows];
  const most = Math.max(1e-9, ...weights);
  const drawing = svg("svg", { class: "overlay", viewBox: `0 0 ${wide} ${tall}`, width: wide, height: tall, role: onpick ? "group" : "img", "aria-label": label });
  drawing.append(svg("image", { href: picture.src, width: wide, height: tall, preserveAspectRatio: "none", class: "pixels" }));
  for (let n = 0; n < picture.rows * picture.columns; n++) {
    const [row, column] = [Math.floor(n / picture.columns), n % picture.columns];
    const pick = onpick && (() => onpick(n));
    drawing.append(svg("rect", {
      x: column * w, y: row * h, width: w, height: h,
      class: ["patch", n === selected && "chosen", hidden.has(n) && "hidden"].filter(Boolean).join(" "),
      "fill-opacity": hidden.has(n) ? 1 : ((0.68 * weights[n]) / most).toFixed(3),
      onclick: pick,
      role: onpick && "button", tabindex: onpick && "0", "aria-label": onpick && `patch ${row + 1}, ${column + 1}: ${figure(weights[n])}`,
      onkeydown: pick && ((event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), pick())),
    }, svg("title", {}, `patch ${row + 1}, ${column + 1}: ${figure(weights[n], 4)}`)));
  }
  return drawing;
}

/** The map, layer and head that a state selects, and the weights. */
export function selection(view, state) {
  const map = view.maps.find((item) => item.name === state.map) ?? view.maps.find((item) => item.name === "cross") ?? view.maps[0];
  const get = unpack(map);
  const [layers, heads] = map.shape;
  const layer = Math.min(Math.max(0, Number(state.layer ?? layers - 1)), layers - 1);
  const head = ["mean", "rollout"].includes(state.head) ? state.head : state.head === undefined ? "mean" : Math.min(Number(state.head), heads - 1);
  const average = (n) => mean(Array.from({ length: heads }, (_, h) => get(n, h)));
  const square = map.shape[2] === map.shape[3] && map.name !== "cross" && !map.overview;
  let weights;
  if (head === "rollout" && square) weights = rollout(Array.from({ length: layers }, (_, n) => average(n)));
  else weights = head === "mean" || head === "rollout" ? average(layer) : get(layer, head);
  return { map, layer, head, weights, square, get, average };
}

/**
 * Draws a view. `options.state` is the selection (map, layer, head, row, merge, label). With `options.onstate`, which
 * receives each new selection, the caller draws the view again; without it the view draws itself.
 */
export function mount(root, view, options = {}) {
  const state = { ...defaults(view), ...options.state };
  const set = (changes) => {
    Object.assign(state, changes);
    options.onstate ? options.onstate({ ...state }) : draw();
  };

  function draw() {
    const chosen = selection(view, state);
    morph(root, [
      options.plain ? null : heading(view),
      toolbar(chosen),
      el("div", { class: "split" },
        el("div", { class: "side" }, el("section", { class: "heads" }, el("h2", {}, "Layers × heads"), gridOf(chosen)), ranking(chosen)),
        el("section", { class: "one" }, single(chosen))),
      view.effect ? effects(view.effect) : null,
      view.notes.length ? el("p", { class: "soft" }, view.notes.join(" ")) : null,
    ]);
  }

  function toolbar({ map }) {
    const tabs = view.maps.map((item) => [item.name, TITLES[item.name]]);
    const groups = [];
    if (tabs.length > 1) groups.push(choice("Which attention", tabs, map.name, (name) => set({ map: name, row: undefined })));
    if (merges(map)) groups.push(choice("Tokens or words", [["tokens", "tokens"], ["words", "words"]], state.merge, (merge) => set({ merge, row: undefined })));
    if (map.written) groups.push(choice("Rows are named by", [["written", "token written"], ["read", "token read"]], state.label, (label) => set({ label })));
    return groups.length ? el("div", { class: "toolbar" }, groups) : null;
  }

  function merges(map) {
    return map.rowWords && map.columnWords && !map.picture && (new Set(map.columnWords).size < map.columns.length || new Set(map.rowWords).size < map.rows.length);
  }

  function namesAndWeights(chosen) {
    const { map } = chosen;
    let rows = (state.label === "written" && map.written ? map.written : map.rows).map(sign);
    let columns = map.columns.map(sign);
    let weights = chosen.weights;
    if (state.merge === "words" && merges(map)) {
      // A row that writes a token belongs to that token's word; the row that reads it is one step later.
      const shifted = map.written && state.label === "read" ? [-1, ...map.rowWords.slice(0, -1)] : map.rowWords;
      rows = wordNames(map.written && state.label !== "read" ? map.written : map.rows, shifted);
      columns = wordNames(map.columns, map.columnWords);
      weights = byWords(weights, shifted, map.columnWords);
    }
    return { rows, columns, weights };
  }

  function gridOf({ map, layer, head, square, get, average }) {
    const [layers, heads] = map.shape;
    const body = [];
    const thumb = (n, h, weights, name) => {
      const canvas = el("canvas", { "aria-hidden": "true" });
      paint(canvas, weights);
      const pressed = n === layer && h === head;
      return el("button", { type: "button", class: "thumb", "data-key": `head-${n}-${h}`, "aria-pressed": String(pressed), "aria-label": `layer ${n + 1}, ${name}`, title: `layer ${n + 1}, ${name}`, onclick: () => set({ layer: n, head: h, map: map.name }), onkeydown: (event) => step(event, n, h) }, canvas, el("span", {}, typeof h === "number" ? h + 1 : name));
    };
    const step = (event, n, h) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const row = typeof h === "number" ? h : heads;
      const to = Math.min(Math.max(row + move[1], 0), heads);
      const next = [Math.min(Math.max(n + move[0], 0), layers - 1), to === heads ? "mean" : to];
      event.currentTarget.closest(".grid").querySelector(`[data-key="head-${next[0]}-${next[1]}"]`)?.focus();
    };
    for (let n = layers - 1; n >= 0; n--) {
      body.push(el("div", { class: "layer" }, el("span", { class: "tick" }, `${n + 1}`),
        Array.from({ length: heads }, (_, h) => thumb(n, h, get(n, h), `head ${h + 1}`)), thumb(n, "mean", average(n), "mean")));
    }
    if (square && map.shape[2] <= 400) {
      const all = rollout(Array.from({ length: layers }, (_, n) => average(n)));
      body.push(el("div", { class: "layer" }, el("span", { class: "tick" }, "all"), thumb(layers - 1, "rollout", all, "rollout")));
    }
    return el("div", { class: "grid" }, body);
  }

  function single(chosen) {
    const { map, layer, head } = chosen;
    const name = head === "rollout" ? "Rollout through all layers" : `Layer ${layer + 1}, ${head === "mean" ? "mean of heads" : `head ${head + 1}`}`;
    const { rows, columns, weights } = namesAndWeights(chosen);
    const row = state.row === undefined ? undefined : Math.min(Number(state.row), rows.length - 1);
    const parts = [el("h2", {}, name), options.tools?.(chosen)];
    if (map.picture && view.picture) {
      parts.push(pictured(chosen, rows, weights));
      if (map.name === "encoder") return parts.concat(numbers(weights, rows, columns));
    } else {
      parts.push(heat(weights, rows, columns, { label: `${name}: ${rows.length} queries, ${columns.length} keys`, selected: row, onselect: (i, j) => set({ row: j !== undefined && row === i ? undefined : i }) }));
      if (row !== undefined) parts.push(bars(weights[row], columns, `${rows[row]} looks at`));
      else parts.push(el("p", { class: "soft" }, map.overview ? "The text is long: a row is one query in many, evenly spaced; a column is several keys together. Each row sums to 1." : "A row is a query, a column a key; each row sums to 1. Click a row for its numbers."));
    }
    parts.push(numbers(weights, rows, columns));
    return parts;
  }

  function pictured(chosen, rows, weights) {
    const { picture } = view;
    const count = picture.rows * picture.columns;
    const over = (row) => row.slice(picture.first, picture.first + count);
    if (chosen.map.name === "cross") {
      return el("div", { class: "strip" }, weights.map((row, i) =>
        el("figure", {}, overlay(picture, over(row), { size: 170, label: `where it looked for ${rows[i]}`, hidden: options.hidden }), el("figcaption", {}, rows[i]))));
    }
    const row = Math.min(Number(state.row ?? 0), rows.length - 1);
    const patch = row - picture.first;
    const average = row < 0 ? weights[0] : weights[row];
    return el("div", {},
      overlay(picture, over(average), { size: 320, selected: patch, hidden: options.hidden, onpick: (n) => set({ row: n + picture.first }), label: "Click a patch to see where it looks" }),
      picture.first ? el("p", {}, el("button", { type: "button", "aria-pressed": String(row === 0), onclick: () => set({ row: 0 }) }, "class token")) : null,
      el("p", { class: "soft" }, patch < 0 ? "Where the class token looks; click a patch." : `Where patch ${Math.floor(patch / picture.columns) + 1}, ${(patch % picture.columns) + 1} looks; click another.`));
  }

  function ranking({ map, layer, head }) {
    if (!map.habits.length) return null;
    const heads = map.habits.flatMap((item, n) => item.map((habit, h) => ({ n, h, ...habit, align: map.name === "cross" && view.best ? view.best.shares[n][h] : undefined, fall: map.falls?.[n]?.[h] })));
    const keys = [["entropy", "entropy", "in nats; 0 looks at one key"], ["same", "same", "share on its own position"], ["previous", "previous", "share on the position before"], ["next", "next", "share on the position after"], ["first", "first", "share on the first key"], ["last", "last", "share on the last key"]];
    if (map.name === "cross") keys.splice(1, 3);
    if (map.name === "decoder") { // no query sees the next key, and only the last query the last key
      keys.splice(5, 1);
      keys.splice(3, 1);
    }
    if (map.picture) keys.splice(map.name === "cross" ? 1 : 2);
    if (map.name === "cross" && view.best) keys.unshift(["align", "alignment", "of what leaving words out can cost, the share that the words linked by this head cost"]);
    if (map.falls) keys.unshift(["fall", "effect", "by how much log p falls with this head off"]);
    const order = keys.some(([key]) => key === state.order) ? state.order : keys[0][0];
    heads.sort((a, b) => (order === "entropy" ? a[order] - b[order] : b[order] - a[order]));
    const most = Object.fromEntries(keys.map(([key]) => [key, Math.max(1e-9, ...heads.map((item) => Math.abs(item[key])))]));
    return el("section", { class: "ranking" }, el("h2", {}, "Heads, ranked"),
      el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Heads, ranked" }, el("table", {},
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "head"), keys.map(([key, name, title]) =>
          el("th", { scope: "col", class: "n", "aria-sort": key === order ? (key === "entropy" ? "ascending" : "descending") : null }, el("button", { type: "button", class: "sort", title, onclick: () => set({ order: key }) }, name, key === order ? " ↓" : ""))))),
        el("tbody", {}, heads.slice(0, 16).map((item) =>
          el("tr", { class: item.n === layer && item.h === head ? "chosen" : null },
            el("th", { scope: "row" }, el("button", { type: "button", class: "link", title: `layer ${item.n + 1}, head ${item.h + 1}`, onclick: () => set({ layer: item.n, head: item.h, map: map.name }) }, `L${item.n + 1} H${item.h + 1}`)),
            keys.map(([key]) => el("td", { class: "n" }, key === order ? meter(Math.abs(item[key]) / most[key], item[key] < 0) : null, figure(item[key], key === order ? 3 : 2)))))))));
  }

  draw();
}

function meter(share, minus) {
  return svg("svg", { class: "meter", width: 36, height: 8, viewBox: "0 0 36 8", "aria-hidden": "true" },
    svg("rect", { width: 36, height: 8, rx: 2, class: "trough" }), svg("rect", { width: 36 * Math.min(1, share), height: 8, rx: 2, class: minus ? "minus" : "plus" }));
}

export function bars(values, names, label, most = 12) {
  const order = values.map((x, j) => [x, j]).sort((a, b) => b[0] - a[0]).slice(0, most);
  const scale = Math.max(1, ...values.map(Math.abs));
  return el("div", { class: "bars" }, el("h3", {}, label), el("table", {}, el("tbody", {}, order.map(([x, j]) =>
    el("tr", {}, el("th", { scope: "row" }, names[j]), el("td", {}, meter(Math.abs(x) / scale, x < 0)), el("td", { class: "n" }, figure(x, 4)))))));
}

function defaults(view) {
  const best = view.best ? { map: "cross", layer: view.best.layer, head: view.best.head } : {};
  return { merge: "tokens", label: "written", ...best };
}

function heading(view) {
  return el("header", {},
    el("h1", {}, view.title),
    view.source ? el("p", { class: "said" }, view.source) : null,
    view.text ? el("p", { class: "said out" }, "→ ", view.text) : null,
    view.tokens.length ? tokens(view.tokens) : null,
    view.labels.length ? [view.answers ? el("h3", {}, view.answers) : null, labels(view.labels)] : null);
}

export function tokens(list, most = 400) {
  const many = list.length > 80 ? { class: "tokens many", tabindex: "0", role: "group", "aria-label": "tokens and their probabilities" } : { class: "tokens" };
  return el("p", many, list.slice(0, most).map(([piece, p]) =>
    el("span", { class: "token", title: `p = ${figure(p, 4)}`, style: { "--p": String(p) } }, sign(piece), el("small", {}, figure(p, 2)))),
    list.length > most ? el("span", { class: "soft" }, `… and ${list.length - most} more`) : null);
}

/** Probabilities, the largest first; `content` turns a name into the content of its cell. */
export function labels(list, content = (name) => name) {
  return el("div", { class: "bars" }, el("table", {}, el("tbody", {}, list.slice(0, 10).map(([name, p], n) =>
    el("tr", {}, el("th", { scope: "row" }, content(sign(name), n)), el("td", {}, meter(p)), el("td", { class: "n" }, figure(p, 4)))))));
}

/** The effect of each source word: by how much log p of each token falls when the word is hidden. */
export function effects(effect) {
  const totals = effect.falls.map((row) => row.reduce((sum, x) => sum + x, 0));
  const names = effect.units.map(sign);
  const several = effect.tokens.length > 1;
  const fallen = several ? "each token" : `“${sign(effect.tokens[0] ?? "")}”`;
  return el("section", { class: "effect" }, el("h2", {}, "What hiding each part does"),
    el("p", { class: "soft" }, `By how much log p of ${fallen} falls when nobody may attend to a part of what was read. A weight says where a head looked; this says what it mattered. Orange is what became likelier.`),
    several ? heat(transposed(effect.falls), effect.tokens.map(sign), names, { label: "Fall of log p, token by hidden part", signed: true }) : null,
    bars(totals, names, several ? "All tokens together" : `Fall of log p of ${fallen}`),
    numbers(effect.falls, names, effect.tokens.map(sign)));
}

export function transposed(matrix) {
  return matrix.length ? matrix[0].map((_, j) => matrix.map((row) => row[j])) : [];
}
