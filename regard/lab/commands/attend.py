"""`regard attend`: attention by hand, for matrices that are typed or read from files.

regard attend --query "1 2; 3 1" --key "2 1; 1 1; 0 1" --value "1 2 -2; 1 1 2; 0 1 -1"
regard attend --query x.csv --mask causal --explain "A[2,1]"
"""

import argparse
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from regard.attention.mask import Mask, causal, documents, padding, prefix, window
from regard.lab import matrix
from regard.lab.commands.parser import Parser
from regard.lab.matrix import Matrix
from regard.lab.stages import Arithmetic, Convention, arithmetic, chosen, stages
from regard.lab.steps import Steps, operations, steps

EXAMPLE = """\
A matrix is "1 2; 3 1", with fractions if you like (1/2), or the name of a .csv or .npy file.
For example:
  regard attend --query "1 2; 3 1" --key "2 1; 1 1; 0 1" --value "1 2 -2; 1 1 2; 0 1 -1"
  regard attend --query "1 2 1" --key "1 2 3; 1 2 1; 0 1 -1" --no-scale
  regard attend --query x.csv --mask causal --explain "A[2,1]" C
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
    add("--beta", help="inverse temperature: a number, a fraction or inf; by default 1/√d")
    add("--no-scale", action="store_true", help="do not scale the scores; the same as --beta 1")
    add(
        "--mask",
        help="causal, window:LEFT or window:LEFT,RIGHT, padding:KEYS, prefix:KEYS or "
        "documents:ID,ID,…; several joined by &; or a matrix of 0 and 1 (1 may attend)",
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
    options = parser().parse_args(_joined(words))
    if not 0 <= options.digits <= 15:
        raise ValueError(f"digits ({options.digits}) must be 0 to 15, as many as float64 has")
    convention: Convention = options.convention
    worked = work_out(options)
    explained: list[Arithmetic] = []
    if options.explain is not None:
        entries = chosen(stages(worked, convention, options.digits), options.explain)
        explained = [arithmetic(worked, *entry, convention, options.digits) for entry in entries]
    if options.json or options.latex or options.markdown:
        from regard.lab import export

        if options.json:
            data = export.to_json(worked, convention, explained)
            print(json.dumps(data, ensure_ascii=False, allow_nan=False))
        else:
            write = export.to_latex if options.latex else export.to_markdown
            print(write(worked, convention, options.digits, explained))
        return
    _print(worked, convention, options.digits, explained)


def work_out(options: argparse.Namespace) -> Steps:
    """The steps of attention for these options."""
    query = matrix.read(options.query, "query")
    key = query if options.key is None else matrix.read(options.key, "key")
    value = key if options.value is None else matrix.read(options.value, "value")
    _check(query, key, value, options.convention)
    if options.convention == "columns":
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
    return steps(query, key, value, mask, beta)


def _check(query: Matrix, key: Matrix, value: Matrix, convention: Convention) -> None:
    across, count = ("column", "row") if convention == "rows" else ("row", "column")

    def sizes(one: Matrix) -> tuple[int, int]:
        """How many vectors, and how wide."""
        size = len(one.rows), len(one.rows[0])
        return size if convention == "rows" else size[::-1]

    (_, width), (keys, key_width), (values, _) = sizes(query), sizes(key), sizes(value)
    if width != key_width:
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
    """A mask by name, several joined by &, or a matrix of 0 and 1."""
    named = [_named(part.strip(), S) for part in text.split("&")]
    known = [mask for mask in named if mask is not None]
    if len(known) == len(named):
        joined = known[0]
        for mask in known[1:]:
            joined = joined & mask
        return joined
    if known or not (matrix.like_numbers(text) or Path(text).suffix):
        unknown = next(part for part, mask in zip(text.split("&"), named) if mask is None)
        raise ValueError(
            f"mask ({unknown.strip()!r}) is unknown; choose from {MASKS}, or give a matrix "
            "of 0 and 1 (1 may attend)"
        )
    entries = matrix.read(text, "mask")
    if other := [cell for row in entries.rows for cell in row if cell not in (0, 1)]:
        raise ValueError(
            f"mask has {matrix.plain(other[0])}; write 1 for may attend and 0 for may not"
        )
    rows = entries if convention == "rows" else entries.transposed
    if (len(rows.rows), len(rows.rows[0])) != (L, S):
        size = f"{len(entries.rows)} × {len(entries.rows[0])}"
        want = f"{L} × {S}" if convention == "rows" else f"{S} × {L}"
        sides = "queries × keys" if convention == "rows" else "keys × queries"
        raise ValueError(f"mask is {size} but must be {want}, {sides}")
    return Mask.from_tensor(rows.tensor() > 0)


def _named(text: str, S: int) -> Mask | None:
    """A mask by its name and numbers; None where the name is unknown."""
    name, colon, numbers = text.partition(":")
    if name == "causal" and not colon:
        return causal()
    if name not in ("window", "padding", "prefix", "documents"):
        return None
    if not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise ValueError(f"mask ({text!r}) needs whole numbers after {name}; as in {MASKS}")
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

_TAKERS = ("--query", "-q", "--key", "-k", "--value", "-v", "--beta")


def _joined(words: Sequence[str]) -> list[str]:
    """A matrix may begin with a minus and is no option then: --query=-1/2."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _TAKERS and re.match(r"[-−][\d.]", word):
            flag = {"-q": "--query", "-k": "--key", "-v": "--value"}.get(joined[-1], joined[-1])
            joined[-1] = f"{flag}={word}"
        else:
            joined.append(word)
    return joined


def _print(
    worked: Steps, convention: Convention, digits: int, explained: Sequence[Arithmetic]
) -> None:
    from regard.lab.byhand import show, show_arithmetic, show_operations
    from regard.lab.terminal import printing

    with printing() as console:
        show(worked, console, convention, digits)
        show_operations(operations(worked), console)
        if explained:
            show_arithmetic(explained, console)
