"""The documentation as a site: pages of Markdown, and a reference made of the docstrings.

    python docs/build.py OUT        every page as one HTML file, which opens from disk

Pages stand in `PAGES`, in the order in which they are read. The reference is read from the source
without importing it: the docstrings of modules, classes, functions and settings, with signatures.
"""

import ast
import html
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from markdown_it import MarkdownIt

HERE = Path(__file__).parent
ROOT = HERE.parent

PAGES = {
    "Get started": ("index", "start", "windows", "runs", "coming-from"),
    "Tasks": ("translate", "classify", "read", "language", "label", "transfer"),
    "Library": ("python", "look", "checks", "attention", "masks", "positions"),
    "Speed": ("speed", "benchmarks"),
    "Serving and results": ("serve", "export", "recipes", "results"),
    "Teaching": ("course",),
    "Development": ("architecture", "extending", "development"),
}

PACKAGES = (
    "attention",
    "model",
    "data",
    "train",
    "decode",
    "look",
    "checks",
    "interop",
    "task",
    "service",
)
"""Whose modules the reference covers."""


@dataclass(frozen=True)
class Page:
    name: str
    title: str
    body: str
    """HTML."""
    text: str
    """Words alone, to be searched."""
    heads: list[tuple[str, str]]
    """Anchors and titles of the sections."""


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    guides = {name: read_guide(name) for names in PAGES.values() for name in names}
    reference = list(references())
    style, script = ((HERE / name).read_text("utf-8") for name in ("site.css", "site.js"))
    pages = [*guides.values(), *reference]
    index = [[page.name, page.title, page.heads, page.text[:40_000]] for page in pages]
    (out / "site.css").write_text(style, "utf-8")
    (out / "site.js").write_text(
        f"const INDEX = {json.dumps(index, ensure_ascii=False)};\n{script}", "utf-8"
    )
    for page in pages:
        (out / f"{page.name}.html").write_text(frame(page, guides, reference), "utf-8")
    for picture in sorted(HERE.glob("*.png")) + sorted(HERE.glob("*.svg")):
        shutil.copy(picture, out)
    print(f"{out / 'index.html'}: {len(guides)} guides, {len(reference)} pages of reference")


# Guides


ABOVE = {"results": "RESULTS.md"}
"""Pages that stand beside README, from where pictures are within docs."""


def read_guide(name: str) -> Page:
    path = ROOT / ABOVE[name] if name in ABOVE else HERE / f"{name}.md"
    return render(name, path.read_text("utf-8").replace("](docs/", "]("))


def render(name: str, source: str) -> Page:
    parser = MarkdownIt("commonmark").enable("table")
    heads: list[tuple[str, str]] = []
    tokens = parser.parse(source)
    for n, token in enumerate(tokens):
        if token.type == "heading_open":
            title = tokens[n + 1].content.replace("`", "")
            anchor = re.sub(r"\W+", "-", title.lower()).strip("-")
            token.attrSet("id", anchor)
            if token.tag != "h1":
                heads.append((anchor, title))
        for child in token.children or ():
            if child.type == "link_open":
                address = str(child.attrGet("href"))
                for other, file in ABOVE.items():
                    address = address.replace(f"../{file}", f"{other}.md")
                child.attrSet("href", re.sub(r"^([\w.-]+)\.md(#|$)", r"\1.html\2", address))
    title = next(t.content for n, t in enumerate(tokens) if n and tokens[n - 1].tag == "h1")
    words = " ".join(t.content for t in tokens if t.type in ("inline", "fence"))
    words = re.sub(r"[`*\s]+", " ", words)
    body = parser.renderer.render(tokens, parser.options, {})
    return Page(name, title.replace("`", ""), _scrolling(body), words, heads)


def _scrolling(body: str) -> str:
    """Wide tables scroll by themselves, not the page; keyboards reach them."""
    opened = '<div class="wide" tabindex="0" role="region" aria-label="Table"><table>'
    return body.replace("<table>", opened).replace("</table>", "</table></div>")


def frame(page: Page, guides: dict[str, Page], reference: list[Page]) -> str:
    def link(to: Page) -> str:
        here = ' aria-current="page"' if to.name == page.name else ""
        return f'<li><a href="{to.name}.html"{here}>{html.escape(to.title)}</a></li>'

    groups = [
        f"<li><span>{group}</span><ol>{''.join(link(guides[name]) for name in names)}</ol></li>"
        for group, names in PAGES.items()
    ]
    listed = "".join(map(link, reference))
    opened = " open" if page in reference else ""
    groups.append(
        f"<li><details{opened}><summary>Reference</summary><ol>{listed}</ol></details></li>"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(page.title)} · Regard</title>
<link rel="stylesheet" href="site.css">
<script src="site.js" defer></script>
</head>
<body>
<a class="skip" href="#main">Skip to the text</a>
<nav aria-label="Pages">
<p class="brand"><a href="index.html">Regard</a></p>
<label for="find">Search</label>
<input id="find" type="search" autocomplete="off" placeholder="weight decay, beams, …">
<ol id="found" aria-live="polite" hidden></ol>
<ol id="pages">{"".join(groups)}</ol>
</nav>
<main id="main">{page.body}</main>
</body>
</html>
"""


# Reference


def references() -> Iterator[Page]:
    for package in PACKAGES:
        modules = [
            path
            for path in sorted((ROOT / "regard" / package).rglob("*.py"))
            if not path.name.startswith("_") or path.name == "__init__.py"
        ]
        parts = [f"# regard.{package}\n"]
        for path in modules:
            tree = ast.parse(path.read_text("utf-8"))
            if text := describe(tree, _module_name(path)):
                parts.append(text)
        yield render(f"api-{package}", "\n\n".join(parts))


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def describe(tree: ast.Module, name: str) -> str:
    """A module in Markdown: its docstring and those of its classes and functions."""
    shown = [
        _definition(node)
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node)
    ]
    about = ast.get_docstring(tree)
    if not about or not (shown or name.count(".") == 1):
        return ""
    return "\n\n".join([f"## `{name}`", _literal(about), *shown])


def _definition(node: ast.ClassDef | ast.FunctionDef) -> str:
    text = _literal(ast.get_docstring(node) or "")
    if isinstance(node, ast.FunctionDef):
        return f"### `{node.name}`\n\n```python\n{_signature(node)}\n```\n\n{text}"
    parts = [f"### `{node.name}`", text]
    fields = list(_fields(node))
    if fields:
        rows = [f"| `{name}` | {_cell(kind)} | {_cell(words)} |" for name, kind, words in fields]
        parts.append("\n".join(["| attribute | type and default | |", "|---|---|---|", *rows]))
    for method in node.body:
        public = isinstance(method, ast.FunctionDef) and (
            not method.name.startswith("_") or method.name == "__init__"
        )
        if public and (method.name == "__init__" or ast.get_docstring(method)):
            text = _literal(ast.get_docstring(method) or "")
            parts.append(f"```python\n{_signature(method, node.name)}\n```\n\n{text}".strip())
    return "\n\n".join(parts)


def _signature(node: ast.FunctionDef, owner: str = "") -> str:
    name = owner if node.name == "__init__" else f"{owner}.{node.name}" if owner else node.name
    parameters = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    line = f"{name}({parameters})"
    if len(line) > 90:
        inner = ",\n    ".join(_split(parameters))
        line = f"{name}(\n    {inner},\n)"
    returns = "" if node.returns is None or node.name == "__init__" else ast.unparse(node.returns)
    return f"{line} -> {returns}" if returns else line


def _split(arguments: str) -> list[str]:
    """At commas that are in no brackets and no text."""
    parts, depth, quote, start = [], 0, "", 0
    for n, sign in enumerate(arguments):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and not depth:
            parts.append(arguments[start:n].strip())
            start = n + 1
    return [*parts, arguments[start:].strip()]


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Annotated attributes with the docstring that follows each."""
    for field, after in zip(node.body, [*node.body[1:], None]):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                value = "" if field.value is None else f" = {ast.unparse(field.value)}"
                kind = f"`{ast.unparse(field.annotation)}{value}`"
                yield name, kind, " ".join(words.split())


def _literal(text: str) -> str:
    """A docstring's indented lines and its examples are shown as they stand; the rest flows."""
    text = re.sub(r"(?m)^ {4}(?=\S)", "        ", text.strip())
    return re.sub(r"(?m)^>>> (?:.+\n?)+", lambda example: indent(example[0], "    "), text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
