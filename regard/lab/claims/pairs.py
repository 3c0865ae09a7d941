"""The cost of all pairs: attention's two products, and what a window saves.

    n_q n_k d_k + n_q n_k d_v        the scores, and the weighted sum of the values

Counted while attention runs.
"""

from torch import Tensor

from regard import attend, window
from regard.lab.claims.costs import N, cost, growth, multiply_adds
from regard.lab.claims.sample import normal
from regard.lab.cost.layers import Sizes, pairs_in_window
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    conditional,
    corrected,
    holds,
)
from regard.lab.place import Place


def _dot_products() -> Finding:
    alone = growth(lambda s: cost("attention alone", s).multiply_adds)
    whole = growth(lambda s: cost("attention, with projections", s).multiply_adds)
    rows = []
    for n in (16, 64, 256, 1024):
        sizes = Sizes(n, 64)
        products = cost("attention alone", sizes).multiply_adds
        everything = cost("attention, with projections", sizes).multiply_adds
        rows.append((n, products, everything - products, (everything - products) / everything))
    head = ("N", "products 2N²D", "projections 4ND²", "their share")
    return Finding(
        conditional(inside=alone == (2.0, 1.0), outside=whole == (2.0, 1.0)),
        {
            "powers of N and D, the products alone": list(alone),
            "powers of N and D, the whole layer": list(whole),
            "share of the projections at N = D": rows[1][3],
        },
        (Table("Multiply-adds at D = 64", head, tuple(rows)),),
    )


def _value_product() -> Finding:
    L_q, L_k, d_k = 7, 11, 8
    widths = (1, 2, 4, 8, 16, 32)

    def executed(d_v: int) -> int:
        query, key, value = normal(0, L_q, d_k), normal(1, L_k, d_k), normal(2, L_k, d_v)
        return multiply_adds(lambda: attend(query, key, value, backend="formula"))

    counts = [executed(d_v) for d_v in widths]
    taught = [L_q * L_k * d_k for _ in widths]
    complete = [L_q * L_k * (d_k + d_v) for d_v in widths]
    return Finding(
        corrected(taught=counts == taught, correct=counts == complete),
        {
            "widths of the values": list(widths),
            "multiply-adds counted": counts,
            "L_q L_k d_k": taught,
            "L_q L_k (d_k + d_v)": complete,
        },
        plots=(
            Plot(
                f"Multiply-adds of {L_q} queries over {L_k} keys of width {d_k}",
                "width of the values",
                "multiply-adds",
                (
                    Curve("counted", widths, counts),
                    Curve("L_q L_k (d_k + d_v)", widths, complete),
                    Curve("L_q L_k d_k", widths, taught),
                ),
            ),
        ),
    )


def _like_dense() -> Finding:
    rows = []
    for d in (2, 4, 8, 16, 32, 64):
        sizes = Sizes(N, d, heads=1)
        attention = cost("attention alone", sizes).multiply_adds
        dense = cost("dense over all positions", sizes).multiply_adds
        rows.append((d, attention, dense, dense / attention))
    widths, ratios = [row[0] for row in rows], [row[3] for row in rows]
    head = ("d", "attention", "dense", "times as much")
    return Finding(
        corrected(taught=max(ratios) < 2, correct=all(r == d / 2 for r, d in zip(ratios, widths))),
        {
            "at d": widths,
            "a dense layer costs, times attention": ratios,
            "and times the scores alone": [2 * ratio for ratio in ratios],
        },
        (Table(f"Multiply-adds at n = {N}", head, tuple(rows)),),
        (
            Plot(
                "A dense layer's multiply-adds for each of attention's",
                "d",
                "ratio",
                (
                    Curve("counted", widths, ratios),
                    Curve("d/2", widths, [d / 2 for d in widths]),
                    Curve("as many", widths, [1 for _ in widths]),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def _window_cost() -> Finding:
    w, d = 16, 8
    rows = []
    for n in (256, 512, 1024):
        x = normal(0, 1, 1, n, d)

        def near(x: Tensor = x) -> Tensor:
            return attend(x, x, x, mask=window(w), backend="packed")

        def everywhere(x: Tensor = x) -> Tensor:
            return attend(x, x, x)

        rows.append(
            (n, 2 * pairs_in_window(n, w) * d, multiply_adds(near), multiply_adds(everywhere))
        )
    grows = [rows[i + 1][2] / rows[i][2] for i in range(2)]
    exact = int(window(w).tensor(256, 256).sum()) == pairs_in_window(256, w)
    head = ("L", "needed, 2 pairs d", "counted, in the window", "counted, without one")
    return Finding(
        holds(exact and max(grows) < 2.3 and rows[2][2] < rows[2][3] / 4),
        {
            "times as much for twice the length, in the window": grows,
            "share of the whole at L = 1024": rows[2][2] / rows[2][3],
        },
        (Table(f"Multiply-adds, {w} positions to each side, d = {d}", head, tuple(rows)),),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        13,
        "dot-product-cost",
        Place("slides", "shared weights"),
        "Dot-product self-attention costs O(N²D).",
        "Multiply-adds are counted while attention runs, without projections and with them, at "
        "twice the length and at twice the width.",
        _dot_products,
        (r"4ND^2 + 2N^2D",),
        correct="Its two products do, 2N²D. The projections around them cost 4ND², which is more whenever "
        "N < 2D.",
    ),
    Experiment(
        86,
        "value-product",
        Place("handout", "complexity"),
        "Attention costs O(L_q L_k d_k).",
        "The multiplications of the matrix products are counted while attention is executed, for "
        "values of growing width.",
        _value_product,
        (r"O\bigl(L_q L_k (d_k + d_v)\bigr)",),
        correct="Those are the scores alone. The weighted sum of the values takes another L_q L_k d_v.",
    ),
    Experiment(
        86,
        "like-a-dense-layer",
        Place("handout", "complexity"),
        "Attention costs about as much as a dense layer.",
        "A layer that is dense over all positions and channels, and attention, map the same "
        "sequence; the multiplications of both are counted at growing widths.",
        _like_dense,
        (r"\frac{n^2 d^2}{2 n^2 d} = \frac{d}{2}",),
        correct="The dense layer takes n²d² multiplications, attention's two products 2n²d: the dense one "
        "costs d/2 times as much, and d times as much as the scores alone.",
    ),
    Experiment(
        90,
        "window-cost",
        Place("handout", "cost table"),
        "A local window limits what attention costs.",
        "Attention runs in a window and without one, while the length doubles; what the kernel "
        "executes is counted, beside the pairs that the mask allows.",
        _window_cost,
        correct="In a window the cost grows with the length rather than with its square, if the kernel "
        "leaves out what is masked. Kernels work in blocks, and so do a little more than is "
        "needed.",
    ),
)
