r"""LaTeX equations as MathML for a page, and as plain characters for a terminal.

\frac{QK^\top}{\sqrt{d_k}}    →    (QKᵀ) / √dₖ
"""

import re

_NAMED = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "Delta": "Δ", "epsilon": "ε",
    "varepsilon": "ε", "eta": "η", "theta": "θ", "lambda": "λ", "mu": "μ", "nu": "ν", "pi": "π",
    "rho": "ρ", "sigma": "σ", "Sigma": "Σ", "tau": "τ", "phi": "φ", "varphi": "φ", "Phi": "Φ",
    "omega": "ω", "Omega": "Ω", "ell": "l", "partial": "∂", "nabla": "∇", "infty": "∞",
    "sum": "Σ", "prod": "Π", "cdot": "·", "cdots": "⋯", "vdots": "…", "ldots": "…", "dots": "…",
    "times": "×",
    "pm": "±", "leq": "≤", "le": "≤", "geq": "≥", "ge": "≥", "neq": "≠", "ne": "≠", "ll": "≪",
    "gg": "≫", "approx": "≈", "sim": "~", "equiv": "≡", "propto": "∝", "to": "→",
    "rightarrow": "→", "longrightarrow": "→", "Rightarrow": "⇒", "Longrightarrow": "⇒",
    "Leftrightarrow": "⇔", "iff": "⇔", "implies": "⇒", "mapsto": "↦", "in": "∈", "notin": "∉",
    "subset": "⊂", "forall": "∀", "exists": "∃", "lVert": "‖",
    "rVert": "‖", "Vert": "‖", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "|": "‖",
    "langle": "⟨", "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉",
    "top": "ᵀ", "intercal": "ᵀ", "prime": "′", "circ": "∘", "odot": "⊙", "oplus": "⊕",
    "otimes": "⊗", "ast": "∗", "star": "⋆", "div": "÷", "perp": "⊥", "parallel": "∥",
    "quad": "\u00a0" * 3, "qquad": "\u00a0" * 6, ",": "", ";": "", ":": "", " ": "\u00a0", "!": "",
    "left": "", "right": "", "big": "", "Big": "", "bigl": "", "bigr": "", "Bigl": "",
    "Bigr": "", "displaystyle": "", "textstyle": "", "limits": "", "nolimits": "", "{": "{",
    "}": "}", "%": "%", "_": "_", "&": "&", "#": "#", "\\": "; ", "hline": "",
}  # fmt: skip
"""Commands that are one character, or nothing, in plain text; others keep their name: max, exp."""

_FACES = {
    "text",
    "textrm",
    "mathrm",
    "mathbf",
    "mathit",
    "mathsf",
    "mathbb",
    "operatorname",
    "boldsymbol",
}
_MARKS = {
    "hat": "\u0302",
    "tilde": "\u0303",
    "bar": "\u0304",
    "vec": "\u20d7",
    "overline": "\u0304",
}
_ABOVE = dict(zip("0123456789+-−=()niTᵀ′βδ", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱᵀᵀ′ᵝᵟ"))
_BELOW = dict(zip("0123456789+-−=()aehijklmnoprstuvxβγρφ", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩ"))
_RELATIONS = "=<>≈~≡∝→⇒⇔↦∈∉⊂≤≥≠≪≫"
_KEPT = "\u00a0"
"""A space that the source asks for."""
_TOKEN = re.compile(r"\\(?:[A-Za-z]+\*?|.)|[{}^_]|\s+|[^\\{}^_\s]", re.DOTALL)


def mathml(latex: str) -> str:
    """The equation as MathML, in display mode."""
    from latex2mathml.converter import convert

    set_ = convert(re.sub(r"\\arg\b", r"\\operatorname{arg}", latex), display="block")
    # Function names and a superscript T are identifiers; the converter makes them operators.
    set_ = re.sub(r"<mo>(?!max|min|lim)([A-Za-z]{2,})</mo>", r"<mi>\1</mi>", set_)
    # A thin space between a function and an argument without parentheses.
    set_ = re.sub(r"(<mi>[a-z]{2,}</mi>)(?=<m[ifns])", r'\1<mspace width="0.17em" />', set_)
    return set_.replace("<mo>&#x022A4;</mo>", '<mi mathvariant="normal">&#x022A4;</mi>')


def plain(latex: str) -> str:
    """The equation on one line of plain text."""
    written = _until(_TOKEN.findall(latex), None)
    # As in LaTeX, spacing is ours: around relations, and around signs between two terms.
    written = re.sub(rf" *([{_RELATIONS}×÷;]) *", r" \1 ", written).replace(" ;", ";")
    written = re.sub(r"(?<=[\w)}\]|‖ᵀ′∞⁰-⁹₀-₉]) *([+−±]) *", r" \1 ", written)
    written = re.sub(r"((?:Σ|Π|max|min)[^\W\d]*[₀-₉ₐ-ₜᵢ-ᵪⱼ]+)(?=\w)", r"\1 ", written)
    written = re.sub(r" {2,}", " ", re.sub(r", *", ", ", written))
    written = re.sub(r" (?=[)\],;.^/|‖])", "", written)
    return written.replace(_KEPT, " ").strip()


def _until(tokens: list[str], end: str | None) -> str:
    """Reads tokens up to the end of a group."""
    parts = []
    while tokens:
        token = tokens.pop(0)
        if token == end:
            break
        parts.append(_one(token, tokens))
    return "".join(parts)


def _next(tokens: list[str]) -> str:
    """Reads the argument of a command or an index: a group, or one character."""
    while tokens and tokens[0].isspace():
        tokens.pop(0)
    return _one(tokens.pop(0), tokens) if tokens else ""


def _one(token: str, tokens: list[str]) -> str:
    if token == "{":
        return _until(tokens, "}")
    if token in "^_":
        return _shifted(_next(tokens), token)
    if token == "-":
        return "−"
    if token == "'":
        return "′"
    if token.isspace():
        return ""
    if token == "~":
        return _KEPT
    if not token.startswith("\\"):
        return token
    match token[1:].rstrip("*") or "*":
        case "frac" | "tfrac" | "dfrac":
            over, under = _next(tokens), _next(tokens)
            return f"{_grouped(over)}/{_grouped(under)}"
        case "sqrt":
            return f"√{_grouped(_next(tokens))}"
        case "begin" | "end":
            _next(tokens)
            return ""
        case name if name in _MARKS:
            return f"{_next(tokens)}{_MARKS[name]}"
        case name if name in _FACES:
            if tokens and tokens[0] == "{":
                return _words(tokens)
            return _next(tokens)
        case name if name in _NAMED:
            return _NAMED[name]
        case name:
            follows = next((t for t in tokens if not t.isspace()), "")
            apart = follows[:1].isalnum() or follows.startswith("\\")
            return f"{name}{_KEPT if apart and name.isalpha() else ''}"


def _words(tokens: list[str]) -> str:
    """Text in braces, in which spaces count."""
    depth, parts = 0, []
    while tokens:
        token = tokens.pop(0)
        depth += (token == "{") - (token == "}")
        parts.append(_KEPT if token.isspace() else "" if token in "{}" else token.lstrip("\\"))
        if not depth:
            break
    return "".join(parts)


def _shifted(index: str, sign: str) -> str:
    raised = _ABOVE if sign == "^" else _BELOW
    tight = index.replace(" ", "")
    if tight and all(letter in raised for letter in tight):
        return "".join(raised[letter] for letter in tight)
    return f"{sign}{tight} " if len(tight) == 1 else f"{sign}({index.strip()}) "


def _grouped(part: str) -> str:
    """In parentheses, unless it is one term."""
    part = part.strip()
    return part if re.fullmatch(r"√?[\w.′ᵀ₀-₉⁰-⁹]+|.", part) else f"({part})"
