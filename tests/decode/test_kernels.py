"""Kernels of a decoding step against float64, one at a time.

With ragged rows, odd widths and every dtype; what the engine makes of them is in test_engines.py.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.position import Layout, RotaryEmbedding
from regard.decode.search import topk
from regard.decode.search.constraints import Constraints

pytest.importorskip("triton")
kernels: Any = pytest.importorskip("regard.decode.engine.cuda.kernels")
from regard.decode.engine.cuda.capture import hidden  # noqa: E402
from regard.decode.engine.cuda.twin import rotation_factors  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, where it interprets
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of the difference's norm, as a share of the result's."""

# The interpreter neither multiplies nor adds bfloat16.
every_dtype = pytest.mark.parametrize(
    "dtype",
    [dtype for dtype in TOLERANCE if DEVICE == "cuda" or dtype is not torch.bfloat16],
    ids=str,
)


def near(have: Tensor, want: Tensor, scale: float = 1.0) -> None:
    error = (have.double().cpu() - want.double().cpu()).norm()
    assert error <= scale * TOLERANCE[have.dtype] * want.double().norm()


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, beta: float) -> Tensor:
    """softmax(β K q) V of one row (H, K) and the keys (S, G, K) of its groups, in float64."""
    group = query.shape[0] // key.shape[1]
    key, value = (t.double().repeat_interleave(group, 1) for t in (key, value))
    scores = beta * torch.einsum("hk,shk->hs", query.double(), key)
    return torch.einsum("hs,shv->hv", scores.softmax(-1), value)


@every_dtype
@pytest.mark.parametrize("layout", [None, "interleaved", "halves"])
@pytest.mark.parametrize("window", [None, 3])
def test_self_attention(dtype: torch.dtype, layout: Layout | None, window: int | None) -> None:
    R, H, G, K, V, T = 3, 4, 2, 16, 32, 23
    filled = [0, 5, 19]
    # Row r reads what any row as long has written at a place, as after beams changed places.
    table = torch.zeros(R, T, dtype=torch.int32)
    for r, count in enumerate(filled):
        for s in range(count):
            longer = [n for n in range(R) if filled[n] > s]
            table[r, s] = s * R + longer[(r + s) % len(longer)]
    joint, slots = (
        normal(R, H * K + G * (K + V), dtype=dtype),
        normal(R * T, G * (K + V), dtype=dtype),
    )
    rotary, factors = None if layout is None else RotaryEmbedding(10, layout=layout), None
    if rotary is not None:
        factors = rotation_factors(rotary, K, T, torch.device(DEVICE))
    held, moved = slots.clone(), table.to(DEVICE)
    have = kernels.self_attention(
        joint, slots, moved, torch.tensor(filled).to(DEVICE), (H, G, K, V), 0.3, factors, window
    )

    queries, keys, values = joint.double().split((H * K, G * K, G * V), -1)
    for r, count in enumerate(filled):
        query, new = queries[r].view(H, K), keys[r].view(G, K)
        if rotary is not None:
            query, new = (
                rotary.rotate(x.cpu()[None, :, None], torch.tensor([[count]]))[0, :, 0].to(DEVICE)
                for x in (query, new)
            )
        place = count * R + r
        assert moved[r, count] == place
        near(slots[place], torch.cat([new.flatten(), values[r]]), 2)
        first = 0 if window is None else max(0, count - window)
        old = held[table[r, first:count].long().to(DEVICE)].double()
        key = torch.cat([old[:, : G * K].view(-1, G, K), new[None]])
        value = torch.cat([old[:, G * K :].view(-1, G, V), values[r].view(1, G, V)])
        near(have[r], attention(query, key, value, 0.3).flatten(), 3)
    written = torch.zeros(len(slots), dtype=torch.bool)
    written[[count * R + r for r, count in enumerate(filled)]] = True
    assert torch.equal(slots[~written.to(DEVICE)], held[~written.to(DEVICE)])


@every_dtype
@pytest.mark.parametrize("beams", [1, 3])
def test_cross_attention(dtype: torch.dtype, beams: int) -> None:
    H, G, K, V = 4, 2, 32, 16
    counts, starts = [37, 1, 0, 5], [3, 40, 2, 41]
    query = normal(len(counts) * beams, H * K, dtype=dtype)
    memory = normal(47, G * (K + V), dtype=dtype)
    start, count = (
        torch.tensor(some).repeat_interleave(beams).to(DEVICE) for some in (starts, counts)
    )
    have = kernels.cross_attention(query, memory, start, count, (H, G, K, V), 0.4, beams)
    for row, out in enumerate(have):
        first, n = starts[row // beams], counts[row // beams]
        read = memory[first : first + n]
        key, value = read[:, : G * K].view(n, G, K), read[:, G * K :].view(n, G, V)
        want = attention(query[row].view(H, K), key, value, 0.4).flatten()
        near(out, want if n else torch.zeros_like(out), 2)


@every_dtype
@pytest.mark.parametrize("width", [1, 37, 64])
def test_add_norm(dtype: torch.dtype, width: int) -> None:
    norm = nn.LayerNorm(width).to(DEVICE)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    wide = normal(5, 1, width + 3, dtype=dtype)
    x, y = wide[..., :width], normal(5, 1, width, dtype=dtype)
    have = kernels.add_norm(x, y, norm)
    assert have.dtype == dtype
    near(have, norm.double()((x + y).double()), 2)


@every_dtype
@pytest.mark.parametrize("width", [7, 1031])
def test_swiglu(dtype: torch.dtype, width: int) -> None:
    x = normal(3, 1, 2 * width, dtype=dtype)
    gate, value = x.double().chunk(2, -1)
    near(kernels.swiglu(x), F.silu(gate) * value, 2)


@every_dtype
def test_embed(dtype: torch.dtype) -> None:
    vectors, places = normal(11, 37, dtype=dtype), normal(13, 37, dtype=dtype)
    tokens, filled = (torch.tensor(some).to(DEVICE) for some in ([3, 10, 0], [12, 0, 7]))
    have = kernels.embed(tokens, vectors, places, filled, 6.5)
    near(have, 6.5 * vectors[tokens].double() + places[filled].double(), 2)


@pytest.mark.parametrize("tokens", [5, 67, 331])
@pytest.mark.parametrize("banned", [[], [0, 3]])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_best_tokens(tokens: int, banned: list[int], renormalize: bool) -> None:
    rules = {"end": 2, "max_length": 9, "min_length": [0, 4, 4], "banned": banned}
    constraint = Constraints(3, tokens, renormalize=renormalize, device=DEVICE, **rules)  # type: ignore[arg-type]
    logits = torch.randint(-3, 4, (3, tokens)).to(DEVICE, torch.float32)  # with many ties
    logits[1, 4:] = -torch.inf
    times = torch.full((3,), 2).to(DEVICE)
    masks = (hidden(constraint, tokens), 2, constraint.least, times, renormalize)
    have = kernels.best(logits.clone(), 4, *masks)
    want = topk.best(logits.clone(), 4, constraint, 2)
    torch.testing.assert_close(have[0], want[0].float(), atol=1e-5, rtol=1e-5)
    possible = want[0] > -torch.inf
    assert torch.equal(have[1][possible], want[1][possible])
