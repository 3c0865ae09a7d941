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
    holds,
    more_exactly,
)
from regard.lab.numbers import figure
from regard.lab.place import Place


def _dot_products() -> Finding:
    dots = growth(lambda s: _scores(s.length, s.length, s.width))
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
        holds(dots == (2.0, 1.0) and alone == (2.0, 1.0)),
        {
            "powers of N and D, the dot products": list(dots),
            "powers of N and D, both products": list(alone),
            "powers of N and D, the whole layer": list(whole),
            "share of the projections at N = D": rows[1][3],
        },
        (Table("Multiply-adds at D = 64", head, tuple(rows)),),
        conclusion=f"The dot products grow with N to the power {figure(dots[0])} and D to the "
        f"power {figure(dots[1])}. Worth adding: the projections around them cost O(N D²), 4ND² "
        f"with W_O; at N = D = 64 they are {rows[1][3]:.0%} of the layer's multiply-adds, at N = "
        f"1,024 {rows[3][3]:.0%}.",
    )


def _value_product() -> Finding:
    L_q, L_k, d_k = 7, 11, 8
    widths = (1, 2, 4, 8, 16, 32)

    def executed(d_v: int) -> int:
        query, key, value = normal(0, L_q, d_k), normal(1, L_k, d_k), normal(2, L_k, d_v)
        return multiply_adds(lambda: attend(query, key, value, backend="formula"))

    counts = [executed(d_v) for d_v in widths]
    scores = [_scores(L_q, L_k, d_k) for _ in widths]
    taught = [L_q * L_k * d_k for _ in widths]
    complete = [L_q * L_k * (d_k + d_v) for d_v in widths]
    return Finding(
        more_exactly(meant=scores == taught and counts == complete, literal=counts == taught),
        {
            "widths of the values": list(widths),
            "multiply-adds counted": counts,
            "L_q L_k d_k, the similarities": taught,
            "L_q L_k (d_k + d_v), with the values": complete,
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
        conclusion=f"The similarities do take {scores[0]} multiply-adds, L_q L_k d_k. All of "
        f"attention takes L_q L_k d_v more, for the weighted sum of the values: {counts[0]} with "
        f"values of width {widths[0]}, {counts[-1]} with width {widths[-1]}. So it is O(L_q L_k "
        "(d_k + d_v)), which is the same order as long as d_v is about d_k.",
    )


def _scores(queries: int, keys: int, width: int) -> int:
    """Multiply-adds of Q Kᵀ alone."""
    query, key = normal(0, queries, width), normal(1, keys, width)
    return multiply_adds(lambda: query @ key.T)


def _mixing(positions: int, width: int) -> int:
    """Those of one weight for each pair of positions, the same in all channels."""
    weight, x = normal(0, positions, positions), normal(1, positions, width)
    return multiply_adds(lambda: weight @ x)


def _like_dense() -> Finding:
    n = N
    rows = []
    for d in (2, 4, 8, 16, 32, 64):
        attention = cost("attention alone", Sizes(n, d, heads=1)).multiply_adds
        dense = _mixing(n, d)
        crossed = cost("dense over all positions", Sizes(n, d, heads=1)).multiply_adds
        rows.append((d, attention, dense, attention / dense, crossed / attention))
    ratios = [row[3] for row in rows]
    head = ("d", "attention", "dense", "attention / dense", "dense with cross-channels / attention")
    return Finding(
        holds(set(ratios) == {2.0}),
        {
            "attention's multiply-adds over a dense layer's, no cross-channel weights": ratios,
            "a dense layer's with cross-channel weights, over attention's": [r[4] for r in rows],
        },
        (Table(f"Multiply-adds at n = {n}", head, tuple(rows)),),
        conclusion="Without cross-channel weights a dense layer over the positions takes n²d "
        f"multiply-adds, {rows[3][2]:,} at d = {rows[3][0]}, and attention's two products 2n²d, "
        f"{rows[3][1]:,}: {figure(ratios[0])} times as many at every width. With cross-channel "
        f"weights the dense layer would take d/2 times as many as attention, {figure(rows[-1][4])} "
        f"at d = {rows[-1][0]}.",
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
        conclusion=f"With {w} positions to each side, twice the length takes {figure(grows[0], 3)} "
        f"and {figure(grows[1], 3)} times as much, where all pairs take four times as much; at L = "
        f"1,024 it is {rows[2][2] / rows[2][3]:.0%} of the whole. Kernels work in blocks, here "
        f"{figure(rows[2][2] / rows[2][1], 2)} times what is needed.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        13,
        "dot-product-cost",
        Place("slides", "shared weights"),
        "For N input tokens, computing the dot products in a self-attention layer takes O(N²D) "
        "computations.",
        "Multiply-adds are counted for Q Kᵀ alone, for both products and for the layer with its "
        "projections, at twice the length and at twice the width.",
        _dot_products,
        (r"4ND^2 + 2N^2D",),
    ),
    Experiment(
        86,
        "value-product",
        Place("handout", "complexity"),
        "There are L_q × L_k similarities, each of O(d_k) operations, so the overall complexity "
        "is O(L_q × L_k × d_k).",
        "The multiplications of the matrix products are counted while attention is executed, for "
        "values of growing width, and for the similarities alone.",
        _value_product,
        (r"O\bigl(L_q L_k (d_k + d_v)\bigr)",),
    ),
    Experiment(
        86,
        "like-a-dense-layer",
        Place("handout", "complexity"),
        "This is very similar to the complexity of a dense layer, except that attention does not "
        "have cross-channel weights.",
        "A dense layer with one weight for each pair of positions, and attention, map the same "
        "sequence; the multiplications of both are counted at growing widths, beside a dense "
        "layer over all channels.",
        _like_dense,
        (r"2 n^2 d \;\text{against}\; n^2 d",),
    ),
    Experiment(
        90,
        "window-cost",
        Place("handout", "cost table"),
        "As with a convolution, the attention window could be limited to a local neighbourhood.",
        "Attention runs in a window and without one, while the length doubles; what the kernel "
        "executes is counted, beside the pairs that the mask allows.",
        _window_cost,
    ),
)
