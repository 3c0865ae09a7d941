"""The command `attend`: attention by hand, for matrices from options or files.

regard attend --query "1 2; 3 1" --key "2 1; 1 1; 0 1" --value "1 2 -2; 1 1 2; 0 1 -1"
regard attend --query x.csv --mask causal --explain "A[2,1]"
regard attend --query x.csv --w-query Q.csv --w-key K.csv --w-value V.csv --heads 2 --w-output O.csv
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from regard.attention.mask import Mask, causal, documents, padding, prefix, window
from regard.lab import matrix
from regard.lab.commands.parser import Parser
from regard.lab.layer import Layer, layer, layer_operations
from regard.lab.matrix import Matrix
from regard.lab.scoring import Additive, Dot, General, Scoring, size
from regard.lab.stages import Arithmetic, Convention, arithmetic, chosen, stages
from regard.lab.steps import Steps, operations

EXAMPLE = """\
A matrix is "1 2; 3 1", with fractions if you like (1/2), or the name of a .csv or .npy file.
For example:
  regard attend --query "1 2; 3 1" --key "2 1; 1 1; 0 1" --value "1 2 -2; 1 1 2; 0 1 -1"
  regard attend --query "1 2 1" --key "1 2 3; 1 2 1; 0 1 -1" --no-scale
  regard attend --query x.csv --mask causal --explain "A[2,1]" C
  regard attend --query "1 2; 3 1" --mask "0 -inf; 0 0"
  regard attend --query "1 0; 0 1" --w-query "1 2; 3 4" --w-key "1 0; 0 1" --heads 2
  regard attend --query "1 2" --key "2 1; 1 1" --score general --w-score "1 0; 0 2"
"""


def parser() -> argparse.ArgumentParser:
    words = Parser(
        "attend",
        "Attention by hand: every matrix from queries, keys and values to the output.",
        EXAMPLE,
    )
    add = words.add_argument
    add("--query", "-q", required=True, metavar="MATRIX", help="one row for each query")
    add("--key", "-k", metavar="MATRIX", help="one row for each key; by default the queries")
    add("--value", "-v", metavar="MATRIX", help="one row for each key's value; by default the keys")
    add("--w-query", metavar="MATRIX", help="W_Q: the queries are --query times it")
    add("--w-key", metavar="MATRIX", help="W_K: the keys are --key times it")
    add("--w-value", metavar="MATRIX", help="W_V: the values are --value times it")
    add("--heads", type=int, default=1, help="heads, which share the columns of Q, K and V (1)")
    add("--w-output", metavar="MATRIX", help="W_O: the output is the heads side by side times it")
    add(
        "--score",
        choices=("dot", "general", "additive"),
        default="dot",
        help="dot: q·k; general: q W k (Luong), with --w-score; additive: v·tanh(q W + k U) "
        "(Bahdanau), with --w-score, --u-score and --v-score",
    )
    add("--w-score", metavar="MATRIX", help="W of a general or an additive score")
    add("--u-score", metavar="MATRIX", help="U of an additive score")
    add("--v-score", metavar="MATRIX", help="v of an additive score, one row")
    add(
        "--beta",
        help="inverse temperature: a number, a fraction or inf; by default 1/√d, or 1 "
        "for other scores than dot",
    )
    add("--no-scale", action="store_true", help="do not scale the scores; the same as --beta 1")
    add(
        "--mask",
        help="causal, window:LEFT or window:LEFT,RIGHT, padding:KEYS, prefix:KEYS or "
        "documents:ID,ID,…; several joined by &; or a matrix: of 0 and -inf, as it is added to the "
        "scores, or of 0 and 1 (1 may attend)",
    )
    add(
        "--convention",
        choices=("rows", "columns"),
        default="rows",
        help="columns: each query, key and value is a column, and H = V softargmax(KᵀQ)",
    )
    add(
        "--explain",
        nargs="*",
        metavar="ENTRY",
        help='show the arithmetic of an entry, "A[1,2]", or of a whole matrix, C; without a name, '
        "of every entry",
    )
    add("--digits", type=int, default=3, help="number of decimals (3)")
    form = words.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="print LaTeX, which needs amsmath")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--json", action="store_true", help="print JSON, with all digits")
    return words


def attend(words: Sequence[str]) -> None:
    """Runs `regard attend`."""
    options = parser().parse_args(_join_negative(words))
    if not 0 <= options.digits <= 15:
        raise ValueError(f"digits ({options.digits}) must be 0 to 15, as many as float64 has")
    convention: Convention = options.convention
    whole = work_out(options)
    heads = whole.heads
    explained = [_arithmetic(head, options) for head in heads]
    alone = len(heads) == 1 and not whole.weights
    if options.json or options.latex or options.markdown:
        from regard.lab import export

        if options.json:
            data = (
                export.to_json(heads[0], convention, explained[0])
                if alone
                else export.layer_to_json(whole, convention, explained)
            )
            print(json.dumps(data, ensure_ascii=False, allow_nan=False))
        elif alone:
            write = export.to_latex if options.latex else export.to_markdown
            print(write(heads[0], convention, options.digits, explained[0]))
        else:
            write_layer = export.layer_to_latex if options.latex else export.layer_to_markdown
            print(write_layer(whole, convention, options.digits, explained))
        return
    _print(whole, convention, options.digits, explained)


def _arithmetic(head: Steps, options: argparse.Namespace) -> list[Arithmetic]:
    """The arithmetic of the requested entries in one head."""
    if options.explain is None:
        return []
    entries = chosen(stages(head, options.convention, options.digits), options.explain)
    return [arithmetic(head, *entry, options.convention, options.digits) for entry in entries]


def work_out(options: argparse.Namespace) -> Layer:
    """The layer for these options; one head without weights is plain attention."""
    columns = options.convention == "columns"

    def read(option: str, name: str) -> Matrix | None:
        text = getattr(options, option)
        entries = None if text is None else matrix.read(text, name)
        return entries.transposed if columns and entries is not None else entries

    query = matrix.read(options.query, "query")
    key = query if options.key is None else matrix.read(options.key, "key")
    value = key if options.value is None else matrix.read(options.value, "value")
    weights = {
        f"W_{letter}": weight
        for letter, option in zip("QKVO", ("w_query", "w_key", "w_value", "w_output"))
        if (weight := read(option, f"--{option.replace('_', '-')}")) is not None
    }
    scoring = _scoring(options, read)
    _check(query, key, value, options.convention, widths=not weights and isinstance(scoring, Dot))
    if columns:
        query, key, value = query.transposed, key.transposed, value.transposed
    if options.no_scale and options.beta is not None:
        raise ValueError(f"--no-scale means --beta 1, but beta is {options.beta}; leave one out")
    beta: Fraction | float | None = None
    if options.no_scale:
        beta = Fraction(1)
    elif options.beta is not None:
        number = matrix.number(options.beta, "beta")
        assert isinstance(number, Fraction | float)
        beta = number
    L, S = len(query.rows), len(key.rows)
    mask = None
    if options.mask is not None:
        mask = read_mask(options.mask, L, S, options.convention)
    inputs = {"query": query, "key": key, "value": value}
    whole = layer(inputs, weights, options.heads, mask, beta, scoring)
    for head in whole.heads:
        if not head.scores.isfinite().all() or head.output.isnan().any():
            raise ValueError(
                "the scores β Q Kᵀ are beyond float64; give query and key smaller entries"
            )
    return whole


_SCORES = {"dot": (), "general": ("w_score",), "additive": ("w_score", "u_score", "v_score")}
"""The matrices of each score."""


def _scoring(options: argparse.Namespace, read: Callable[[str, str], Matrix | None]) -> Scoring:
    """The requested score, with its matrices."""
    takes = _SCORES[options.score]
    matrices: list[Matrix] = []
    for option in _SCORES["additive"]:
        flag = f"--{option.replace('_', '-')}"
        weight_matrix = read(option, flag)
        if weight_matrix is None and option in takes:
            raise ValueError(f"--score {options.score} needs {flag}; give it a matrix")
        if weight_matrix is not None and option not in takes:
            raise ValueError(f"{flag} makes no difference to --score {options.score}; leave it out")
        if weight_matrix is not None:
            matrices.append(weight_matrix)
    match matrices:
        case []:
            return Dot()
        case [weight]:
            return General(weight)
        case _:
            query_weight, key_weight, vector = matrices
            if vector.shape[0] != 1:
                vector = vector.transposed
            if vector.shape[0] != 1:
                raise ValueError(f"--v-score is {size(vector.shape)} but must be one row")
            return Additive(query_weight, key_weight, vector)


def _check(query: Matrix, key: Matrix, value: Matrix, convention: Convention, widths: bool) -> None:
    """Raises unless every key has a value and, if `widths` is True, the width of a query."""
    across, count = ("column", "row") if convention == "rows" else ("row", "column")

    def sizes(vectors: Matrix) -> tuple[int, int]:
        """The number of vectors and their width."""
        size = len(vectors.rows), len(vectors.rows[0])
        return size if convention == "rows" else size[::-1]

    (_, width), (keys, key_width), (values, _) = sizes(query), sizes(key), sizes(value)
    if widths and width != key_width:
        other = "columns" if convention == "rows" else "rows"
        turned = f"; with --convention {other} they would fit" if _fits(query, key, other) else ""
        raise ValueError(
            f"query has {_many(width, across)} but key has {key_width}; a dot product needs the "
            f"same number{turned}"
        )
    if keys != values:
        raise ValueError(
            f"key has {_many(keys, count)} but value has {values}; every key needs one value"
        )


def _fits(query: Matrix, key: Matrix, convention: str) -> bool:
    if convention == "columns":
        return len(query.rows) == len(key.rows)
    return len(query.rows[0]) == len(key.rows[0])


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# Masks

MASKS = "causal, window:2, window:2,0, padding:3, prefix:2, documents:0,0,1"


def read_mask(text: str, L: int, S: int, convention: Convention = "rows") -> Mask:
    """A mask by name, several joined by &, or a matrix of 0 and -inf, or of 0 and 1."""
    parts = [_mask_by_name(part.strip(), S) for part in text.split("&")]
    masks = [mask for mask in parts if mask is not None]
    if len(masks) == len(parts):
        joined = masks[0]
        for mask in masks[1:]:
            joined = joined & mask
        return joined
    if masks or not (matrix.like_numbers(text) or Path(text).suffix):
        unknown = next(part for part, mask in zip(text.split("&"), parts) if mask is None)
        raise ValueError(
            f"mask ({unknown.strip()!r}) is unknown; choose from {MASKS}, or give a matrix "
            "of 0 and -inf"
        )
    entries = matrix.read(text, "mask", infinite=True)
    cells = [cell for row in entries.rows for cell in row]
    added = -math.inf in cells
    kinds = (0, -math.inf) if added else (0, 1)
    if other := [cell for cell in cells if cell not in kinds]:
        raise ValueError(
            f"mask has {matrix.plain(other[0])}; write 0 and -inf, as they are added to the "
            "scores, or 1 for may attend and 0 for may not"
        )
    rows = entries if convention == "rows" else entries.transposed
    if rows.shape != (L, S):
        want = (L, S) if convention == "rows" else (S, L)
        sides = "queries × keys" if convention == "rows" else "keys × queries"
        raise ValueError(f"mask is {size(entries.shape)} but must be {size(want)}, {sides}")
    allowed = rows.tensor() == (0 if added else 1)
    return Mask(lambda at: allowed[at.row, at.column], "as given")


def _mask_by_name(text: str, S: int) -> Mask | None:
    """A mask by its name and numbers; None if the name is unknown."""
    name, colon, numbers = text.partition(":")
    if name == "causal" and not colon:
        return causal()
    if name not in ("window", "padding", "prefix", "documents"):
        return None
    if not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise ValueError(f"mask ({text!r}) needs whole numbers after {name}; as in {MASKS}")
    if any(len(number) > 9 for number in numbers.split(",")):
        raise ValueError(f"mask ({text!r}) has a number beyond 999,999,999; there are {S} keys")
    sizes = [int(number) for number in numbers.split(",")]
    match name, sizes:
        case "window", [left]:
            return window(left)
        case "window", [left, right]:
            return window(left, right)
        case "padding", [length]:
            if length > S:
                raise ValueError(f"mask ({text!r}) leaves {length} keys, but there are {S}")
            return padding([length])
        case "prefix", [length]:
            return prefix(length)
        case "documents", ids:
            return documents(ids)
    raise ValueError(f"mask ({text!r}) has {len(sizes)} numbers; write it as in {MASKS}")


# Options

_TAKERS = (
    *("--query", "-q", "--key", "-k", "--value", "-v", "--beta", "--mask"),
    *("--w-query", "--w-key", "--w-value", "--w-output", "--w-score", "--u-score", "--v-score"),
)


def _join_negative(words: Sequence[str]) -> list[str]:
    """Joins options and matrices that begin with a minus, which are not options: --query=-1/2."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _TAKERS and re.match(r"[-−]([\d.∞]|inf)", word):
            flag = {"-q": "--query", "-k": "--key", "-v": "--value"}.get(joined[-1], joined[-1])
            joined[-1] = f"{flag}={word}"
        else:
            joined.append(word)
    return joined


def _print(
    whole: Layer,
    convention: Convention,
    digits: int,
    explained: Sequence[Sequence[Arithmetic]],
) -> None:
    from regard.lab.byhand import show, show_arithmetic, show_layer, show_operations
    from regard.lab.terminal import printing

    with printing() as console:
        if len(whole.heads) == 1 and not whole.weights:
            (head,) = whole.heads
            show(head, console, convention, digits)
            show_operations(operations(head), console)
        else:
            show_layer(whole, console, convention, digits)
            show_operations(layer_operations(whole), console, "all heads together")
        for number, entries in enumerate(explained, 1):
            if entries:
                title = f"head {number}" if len(explained) > 1 else ""
                show_arithmetic(entries, console, title)
