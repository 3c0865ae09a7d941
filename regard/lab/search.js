// Filters the page by the words in its search box; / goes there, Escape clears it.
const box = document.getElementById("find");
const count = document.getElementById("found");
const parts = [...document.querySelectorAll("article, .stated tbody tr, .errata tbody tr")];
const texts = parts.map((part) => part.textContent.toLowerCase());
const links = [...document.querySelectorAll("nav li li")];
const headings = [...document.querySelectorAll("main h2")];

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  parts.forEach((part, n) => {
    part.hidden = !words.every((word) => texts[n].includes(word));
  });
  for (const link of links) {
    const part = document.getElementById(link.querySelector("a").getAttribute("href").slice(1));
    link.hidden = part !== null && part.hidden;
  }
  for (const heading of headings) {
    // What stands under a heading, up to the next one.
    let below = [];
    for (let next = heading.nextElementSibling; next && next.tagName !== "H2"; ) {
      below.push(next);
      next = next.nextElementSibling;
    }
    const mine = parts.filter((part) => below.some((one) => one.contains(part)));
    heading.hidden = mine.length > 0 && mine.every((part) => part.hidden);
    for (const one of below) {
      if (!parts.includes(one) && one.tagName !== "FOOTER") one.hidden = heading.hidden;
    }
  }
  const left = parts.filter((part) => !part.hidden).length;
  count.textContent = words.length ? left + " of " + parts.length : "";
}

box.closest("p").hidden = false;
box.addEventListener("input", filter);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box) {
    event.preventDefault();
    box.focus();
  } else if (event.key === "Escape" && document.activeElement === box) {
    box.value = "";
    filter();
  }
});
addEventListener("hashchange", () => {
  // A link may lead to what is filtered out.
  const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (part && part.hidden) {
    box.value = "";
    filter();
    part.scrollIntoView();
  }
});
