// The state of elements before and after an update by morph.

async function outlived() {
    const { el, svg, morph, fold } = await import("/view.js");
    const root = el("div");
    document.querySelector("main").append(root);
    let clicks = [];
    const draw = (n, { early = false, open = false, size = 3 } = {}) => morph(root, [
        early && el("p", {}, "early"),
        el("div", { "data-field": "text", class: n % 2 ? "odd" : null },
            el("input", { type: "text", "data-key": "text", value: "same" })),
        el("input", { type: "checkbox", "data-key": "check", checked: n % 2 === 1 }),
        el("select", { "data-key": "select" }, Array.from({ length: size }, (_, k) =>
            el("option", { value: k, selected: k === n % size }, k))),
        el("button", { type: "button", onclick: () => clicks.push(n), onkeydown: n === 0 && (() => clicks.push("stale")) }, n),
        el("div", { class: "scroll", style: { width: "60px", overflow: "auto" } },
            el("div", { style: { width: "600px" } }, n)),
        el("details", { open }, el("summary", {}, "fixed"), n),
        fold("lazy", () => el("table", {}, el("tr", {}, el("td", {}, n)))),
        svg("svg", {}, svg("rect", { "data-key": "rect", x: n, tabindex: 0 })),
        canvas(n),
    ]);
    function canvas(n) {
        const made = el("canvas", { width: 1 + n, height: 1 });
        const context = made.getContext("2d");
        context.fillStyle = `rgb(${10 * n} 0 0)`;
        context.fillRect(0, 0, 1, 1);
        return made;
    }
    const q = (selector) => root.querySelector(selector);
    const results = [];
    const check = (name, holds) => results.push([name, Boolean(holds)]);
    draw(0);
    const before = Object.fromEntries(["input", "select", "button", ".scroll", "details", "rect", "canvas"].map((s) => [s, q(s)]));
    q("input").focus();
    q("input").value = "typed";
    q(".scroll").scrollLeft = 37;
    for (const each of root.querySelectorAll("details")) each.open = true;
    await new Promise((done) => setTimeout(done));
    check("lazy content is built", q("td")?.textContent === "0");
    const cell = q("td");
    draw(1, { early: true, size: 5 });
    for (const [selector, node] of Object.entries(before)) check(`${selector} is kept`, q(selector) === node);
    check("an early sibling is inserted", root.firstChild.textContent === "early");
    check("focus is kept", document.activeElement === q("input"));
    check("a typed value is kept", q("input").value === "typed");
    check("a class is updated", root.querySelector(".odd"));
    check("a scroll position is kept", q(".scroll").scrollLeft === 37);
    check("details stay open", [...root.querySelectorAll("details")].every((each) => each.open));
    check("an open table shows the new numbers", q("td") === cell && cell.textContent === "1");
    check("the checkbox follows", q("[type=checkbox]").checked);
    check("the select follows", q("select").value === "1" && q("select").options.length === 5);
    check("an SVG attribute follows", q("rect").getAttribute("x") === "1");
    const pixel = q("canvas").getContext("2d").getImageData(0, 0, 1, 1).data[0];
    check("the canvas is painted again", q("canvas").width === 2 && pixel === 10);
    q("button").click();
    q("button").dispatchEvent(new KeyboardEvent("keydown", { key: "a" }));
    check("one handler, the latest", JSON.stringify(clicks) === "[1]");
    q("[type=checkbox]").checked = false;
    q("select").value = "0";
    q("[data-key=rect]").focus();
    draw(1, { size: 5 });
    check("a removed sibling is gone", root.firstChild.nodeType === Node.COMMENT_NODE);
    check("a refused check is taken back", q("[type=checkbox]").checked);
    check("a refused choice is taken back", q("select").value === "1");
    check("focus in an SVG is kept", document.activeElement === q("rect"));
    q("details").open = false;
    draw(2, { open: true });
    check("details open where the page opens them", q("details").open);
    q("details").open = false;
    draw(3, { open: true });
    check("details stay as the reader left them", !q("details").open);
    root.remove();
    return results;
}
