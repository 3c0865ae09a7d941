// Finds words in titles first, then in headings, then in the text. INDEX stands above.
const input = document.getElementById("find");
const found = document.getElementById("found");
const pages = document.getElementById("pages");

// weight_decay, weight-decay and Weight decay are the same words.
const plain = (text) => text.toLowerCase().replace(/[-_]/g, " ");

function rank([name, title, heads, text], words) {
  const has = (where) => words.every((word) => plain(where).includes(word));
  if (has(title)) return { score: 3, to: `${name}.html`, title, under: "" };
  const head = heads.find(([, title]) => has(title));
  if (head) return { score: 2, to: `${name}.html#${head[0]}`, title: head[1], under: title };
  if (!has(`${title} ${text}`)) return null;
  const whole = plain(text).indexOf(words.join(" "));
  const at = whole < 0 ? plain(text).indexOf(words[0]) : whole;
  return { score: 1, to: `${name}.html`, title, under: text.slice(Math.max(0, at - 30), at + 60) };
}

function search() {
  const words = plain(input.value).split(/\s+/).filter(Boolean);
  found.hidden = !words.length;
  pages.hidden = words.length > 0;
  found.replaceChildren();
  if (!words.length) return;
  const hits = INDEX.map((page) => rank(page, words)).filter(Boolean);
  hits.sort((a, b) => b.score - a.score);
  for (const hit of hits.slice(0, 20)) {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = hit.to;
    link.textContent = hit.title;
    const under = document.createElement("small");
    under.textContent = hit.under;
    item.append(link, under);
    found.append(item);
  }
  if (!hits.length) found.append("Nothing has all of these words.");
}

input.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLElement && event.target.closest("input, textarea");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    input.focus();
  }
});
