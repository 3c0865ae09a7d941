r"""Texts with mathematics between dollar signs and code between backticks, in three forms.

    "$\sqrt{d_k}$ of `key`"    →    √dₖ of key,   MathML and <code>,   $\sqrt{d_k}$ of \texttt{key}

Texts of the lab write mathematics in plain characters, as do names of measurements; `latex` turns
these into commands too.
"""

import re
import unicodedata
from itertools import cycle

from regard.lab.equation import mathml
from regard.lab.equation import plain as one_line
from regard.lab.report import words

_PARTS = re.compile(r"\$([^$]+)\$|`([^`]+)`")


def plain(text: str) -> str:
    """For a terminal."""
    joined = " ".join(text.split())
    return _PARTS.sub(lambda part: equation(part[1]) if part[1] else part[2], joined)


def equation(latex: str) -> str:
    """An equation for a terminal; a matrix in brackets, row after row."""
    return one_line(_ARRAY.sub(_row_by_row, latex))


_ARRAY = re.compile(r"\\begin\{(bmatrix|cases)\}(.*?)\\end\{\1\}", re.DOTALL)


def _row_by_row(array: re.Match[str]) -> str:
    inside = ";".join(row.replace("&", ",") for row in array[2].split(r"\\"))
    return f"[{inside}]" if array[1] == "bmatrix" else rf"\{{{inside}\}}"


def html(text: str) -> str:
    """For a page."""
    parts = " ".join(text.split()).split("$")
    return "".join(
        mathml(part).replace('display="block"', 'display="inline"') if inside else _spaced(part)
        for part, inside in zip(parts, cycle((False, True)))
    )


def _spaced(part: str) -> str:
    """Words, with the spaces between them and their neighbours."""
    before, after = (" " * edge.isspace() for edge in (part[:1], part[-1:]))
    return f"{before}{words(part)}{after}" if part.strip() else part


def latex(text: str) -> str:
    """For a document that uses amsmath and amssymb."""
    joined, made, end = " ".join(text.split()), [], 0
    for part in _PARTS.finditer(joined):
        made.append(_typeset(joined[end : part.start()]))
        made.append(part[0] if part[1] else rf"\texttt{{{_typeset(part[2], index=False)}}}")
        end = part.end()
    return "".join([*made, _typeset(joined[end:])])


_ESCAPED = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "#": r"\#",
    "_": r"\_", "$": r"\$", "^": r"\^{}", "~": r"\~{}", "<": r"\ensuremath{<}",
    ">": r"\ensuremath{>}", "|": r"\ensuremath{|}", "“": "``", "”": "''", "\u2019": "'", "–": "--",
    "…": r"\dots{}", "\u00a0": "~", "½": r"\ensuremath{\tfrac12}",
}  # fmt: skip
_SYMBOLS = {
    "×": r"\times", "·": r"\cdot", "−": "-", "→": r"\to", "∞": r"\infty", "√": r"\surd",
    "≤": r"\le", "≥": r"\ge", "≠": r"\ne", "≈": r"\approx", "∂": r"\partial", "∈": r"\in",
    "‖": r"\|", "′": "'", "″": "''", "±": r"\pm", "⇒": r"\Rightarrow", "⇔": r"\Leftrightarrow",
    "∇": r"\nabla", "⊥": r"\perp", "÷": r"\div", "✓": r"\checkmark", "✗": r"\times",
    "◐": r"\circ", "≡": r"\equiv", "≪": r"\ll", "≫": r"\gg", "∑": r"\sum",
    "⌈": r"\lceil", "⌉": r"\rceil", "⌊": r"\lfloor", "⌋": r"\rfloor", "⟨": r"\langle",
    "⟩": r"\rangle", "ᵀ": r"^\top", "■": r"\blacksquare", "←": r"\leftarrow", "↦": r"\mapsto",
    "↔": r"\leftrightarrow", "∝": r"\propto", "∘": r"\circ", "⊙": r"\odot", "∧": r"\wedge",
}  # fmt: skip
_ROOT = re.compile(r"√(\([^()]*\)|[\w.]+)")
_MARKS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar"}
_LETTER = f"[A-Za-zα-ωΑ-Ω][{''.join(_MARKS)}]?"
_INDEX = re.compile(rf"(?<![\w\\])({_LETTER})_(\w{{1,3}})(?!\w)")


def _typeset(text: str, index: bool = True) -> str:
    """Plain characters as LaTeX; indices such as d_k become subscripts."""
    made, end = [], 0
    for part in re.finditer(f"{_ROOT.pattern}|{_INDEX.pattern}", text) if index else ():
        made.append(_characters(text[end : part.start()]))
        if part[1]:
            under = _INDEX.sub(r"\1_{\2}", part[1].strip("()"))
            made.append(rf"\ensuremath{{\sqrt{{{_inside(under)}}}}}")
        else:
            made.append(rf"\ensuremath{{{_inside(part[2])}_{{{_inside(part[3])}}}}}")
        end = part.end()
    return "".join([*made, _characters(text[end:])])


def _characters(text: str) -> str:
    return "".join(_ESCAPED.get(letter) or _letter(letter) for letter in _SIGN.findall(text))


_SIGN = re.compile(f".[{''.join(_MARKS)}]?", re.DOTALL)
"""A character, with the mark above it."""


def _letter(letter: str) -> str:
    command = _command(letter)
    return letter if command == letter else rf"\ensuremath{{{command}}}"


def _inside(text: str) -> str:
    """Characters within mathematics, where a command must not run into the next letter."""
    return "".join(
        f"{command} " if (command := _command(letter)).startswith("\\") else command
        for letter in _SIGN.findall(text)
    )


def _command(letter: str) -> str:
    """The command for a symbol, a Greek letter, or a raised, lowered or marked character."""
    if letter in _SYMBOLS:
        return _SYMBOLS[letter]
    if len(letter) > 1:
        return rf"\{_MARKS[letter[1]]}{{{_command(letter[0])}}}"
    match unicodedata.decomposition(letter).split():
        case ["<super>", code]:
            return f"^{{{_command(chr(int(code, 16)))}}}"
        case ["<sub>", code]:
            return f"_{{{_command(chr(int(code, 16)))}}}"
    greek = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(letter, ""))
    if greek is None:
        return letter
    name = greek[2].lower().replace("lamda", "lambda")
    return f"\\{name if greek[1] == 'SMALL' else name.capitalize()}"
