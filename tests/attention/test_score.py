"""Scores against their formulas in plain loops, and attention with them against the softmax."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.attention import score as score_module
from regard.attention.mask import causal, padding
from regard.attention.score import (
    AdditiveScore,
    AlignmentScore,
    BilinearScore,
    DotProduct,
    DotScore,
    ScaledDotScore,
)

# With queries 5 and keys 7 wide, except where the score needs them equal.
SCORES: dict[str, tuple[Callable[[], AlignmentScore], int]] = {
    "dot": (DotScore, 5),
    "scaled dot": (ScaledDotScore, 5),
    "general": (lambda: BilinearScore(5, 7), 7),
    "general per head": (lambda: BilinearScore(5, 7, heads=6), 7),
    "additive": (lambda: AdditiveScore(5, 7, 11), 7),
    "additive per head": (lambda: AdditiveScore(5, 7, 11, heads=6), 7),
}
scores = pytest.mark.parametrize(("build", "key_width"), SCORES.values(), ids=SCORES.keys())
LEARNED = [name for name, (_, width) in SCORES.items() if width == 7]
learned = pytest.mark.parametrize(
    ("build", "key_width"), [SCORES[name] for name in LEARNED], ids=LEARNED
)


def one_score(score: AlignmentScore, query: list[float], key: list[float], head: int) -> float:
    """The formula of the module's docstring for one query and one key, in plain loops."""
    match score:
        case ScaledDotScore():
            return sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(len(query))
        case DotScore():
            return sum(q * k for q, k in zip(query, key, strict=True))
        case BilinearScore():
            weight = (score.weight if score.heads is None else score.weight[head]).tolist()
            return sum(
                q * w * k
                for q, row in zip(query, weight, strict=True)
                for w, k in zip(row, key, strict=True)
            )
        case AdditiveScore():
            own = (score.query_weight, score.key_weight, score.vector)
            W, U, v = (t.tolist() if score.heads is None else t[head].tolist() for t in own)
            return sum(
                v[f]
                * math.tanh(
                    sum(q * W[i][f] for i, q in enumerate(query))
                    + sum(k * U[j][f] for j, k in enumerate(key))
                )
                for f in range(len(v))
            )
    raise AssertionError(score)


def by_loops(score: AlignmentScore, query: Tensor, key: Tensor) -> Tensor:
    """Scores of (B, H, L, K) against (B, G, S, J), in float64."""
    B, H, L, _ = query.shape
    G, S = key.shape[1:3]
    return torch.tensor(
        [
            [
                [
                    [
                        one_score(score, query[b, h, i].tolist(), key[b, h * G // H, j].tolist(), h)
                        for j in range(S)
                    ]
                    for i in range(L)
                ]
                for h in range(H)
            ]
            for b in range(B)
        ],
        dtype=torch.float64,
    ).view(B, H, L, S)


def pair(key_width: int, key_heads: int = 6, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries (2, 6, 3, 5) and keys (2, G, 4, J)."""
    return [
        torch.randn(2, 6, 3, 5, dtype=dtype),
        torch.randn(2, key_heads, 4, key_width, dtype=dtype),
    ]


# --- The scores


@scores
@pytest.mark.parametrize("key_heads", [6, 3, 1])
def test_scores_are_their_formula(
    build: Callable[[], AlignmentScore], key_width: int, key_heads: int
) -> None:
    score = build().double()
    query, key = pair(key_width, key_heads)
    torch.testing.assert_close(score(query, key), by_loops(score, query, key))


@scores
def test_projected_queries_and_keys_give_the_same_scores(
    build: Callable[[], AlignmentScore], key_width: int
) -> None:
    score = build().double()
    query, key = pair(key_width)
    q, k, beta, bias = score.project(query, key)
    got = beta * (q @ k.mT)
    if score.dot_product:
        assert isinstance(score, DotProduct)
        assert bias is None
    else:
        assert bias is not None
        assert beta == 0
        got = got + bias
    torch.testing.assert_close(got, score(query, key))


@pytest.mark.parametrize("name", [name for name in SCORES if "head" not in name])
def test_leading_axes_are_free(name: str) -> None:
    build, key_width = SCORES[name]
    score = build().double()
    query, key = pair(key_width)
    whole = score(query, key)
    torch.testing.assert_close(score(query[1, 2], key[1, 2]), whole[1, 2])
    torch.testing.assert_close(score(query[1], key[1]), whole[1])
    torch.testing.assert_close(score(query[None], key[None])[0], whole)
    shared = score(query, key[:1, :1])
    torch.testing.assert_close(score(query, key[0, 0]), shared)
    torch.testing.assert_close(score(query[:1, :1], key), score(query[0, 0], key))


@learned
def test_heads_have_parameters_of_their_own(
    build: Callable[[], AlignmentScore], key_width: int
) -> None:
    score = build()
    query, key = pair(key_width, dtype=torch.float32)
    same = score(query[:, :1].expand(-1, 6, -1, -1), key[:, :1].expand(-1, 6, -1, -1))
    alike = torch.allclose(same[:, 0], same[:, 1])
    assert alike == (score.heads is None)


def test_general_with_the_identity_is_dot() -> None:
    score = BilinearScore(5, 5).double()
    with torch.no_grad():
        score.weight.copy_(torch.eye(5))
    query, key = pair(5)
    torch.testing.assert_close(score(query, key), DotScore()(query, key))


def test_scores_start_with_variance_one() -> None:
    query, key = torch.randn(2, 211, 64)
    for score in (ScaledDotScore(), BilinearScore(64, 64)):
        assert score(query, key).std().item() == pytest.approx(1, rel=0.1)
    hidden = 4096
    additive = AdditiveScore(64, 64, hidden)
    inside = query @ additive.query_weight + key @ additive.key_weight
    assert inside.std().item() == pytest.approx(1, rel=0.1)
    assert additive.vector.norm().item() == pytest.approx(1, rel=0.1)
    assert DotScore()(query, key).std().item() == pytest.approx(8, rel=0.1)


@scores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_in_lower_precision(
    build: Callable[[], AlignmentScore], key_width: int, dtype: torch.dtype
) -> None:
    score = build().to(dtype)
    query, key = pair(key_width, dtype=dtype)
    got = score(query, key)
    assert got.dtype == dtype
    exact = score.double()(query.double(), key.double())
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@scores
def test_gradients(build: Callable[[], AlignmentScore], key_width: int) -> None:
    score = build().double()
    names = [name for name, _ in score.named_parameters()]

    def call(query: Tensor, key: Tensor, *parameters: Tensor) -> Tensor:
        own = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(score, own, (query, key))

    query = torch.randn(6, 2, 5, dtype=torch.float64, requires_grad=True)
    key = torch.randn(6, 3, key_width, dtype=torch.float64, requires_grad=True)
    own = [p.detach().requires_grad_() for p in score.parameters()]
    assert torch.autograd.gradcheck(call, (query, key, *own), fast_mode=True)


@pytest.mark.parametrize("heads", [None, 6])
@pytest.mark.parametrize("limit", [1, 6 * 2 * 4 * 11, 2 * 6 * 2 * 4 * 11 + 1])
def test_additive_in_pieces(heads: int | None, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    score = AdditiveScore(5, 7, 11, heads).double()
    query, key = pair(7)
    query.requires_grad_()
    whole = score(query, key)
    upstream = torch.randn_like(whole)
    whole_gradient = torch.autograd.grad(whole, query, upstream)[0]
    monkeypatch.setattr(score_module, "CHUNK", limit)
    pieces = score(query, key)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(torch.autograd.grad(pieces, query, upstream)[0], whole_gradient)


def test_the_memory_of_additive_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    tanh = torch.tanh

    def watched(x: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, x.numel())
        return tanh(x)

    monkeypatch.setattr(torch, "tanh", watched)
    query, key = torch.randn(2, 3, 53, 5), torch.randn(3, 17, 7)
    row = 2 * 3 * 17 * 11
    for limit, held in ((10 * row, 10 * row), (4 * row - 1, 3 * row), (1, row)):
        largest = 0
        monkeypatch.setattr(score_module, "CHUNK", limit)
        AdditiveScore(5, 7, 11)(query, key)
        assert largest == held


@scores
@pytest.mark.parametrize(("L", "S"), [(0, 4), (3, 0), (0, 0), (1, 1)])
def test_empty_and_single_rows(
    build: Callable[[], AlignmentScore], key_width: int, L: int, S: int
) -> None:
    got = build()(torch.randn(2, 6, L, 5), torch.randn(2, 6, S, key_width))
    assert got.shape == (2, 6, L, S)


@learned
def test_construction_on_the_meta_device(
    build: Callable[[], AlignmentScore], key_width: int
) -> None:
    with torch.device("meta"):
        score = build()
        query, key = torch.empty(2, 6, 3, 5), torch.empty(2, 6, 4, key_width)
        assert score(query, key).shape == (2, 6, 3, 4)
    ready = build()
    score.to_empty(device="cpu").load_state_dict(ready.state_dict())
    query, key = pair(key_width, dtype=torch.float32)
    assert torch.equal(score(query, key), ready(query, key))
    assert type(score).__name__ + "(5, 7" in repr(score)


@scores
@pytest.mark.usefixtures("unchecked")
def test_scores_compile_to_one_graph(build: Callable[[], AlignmentScore], key_width: int) -> None:
    torch.compiler.reset()
    score = build()
    query, key = pair(key_width, dtype=torch.float32)
    compiled = torch.compile(score, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), score(query, key))


# --- Attention with them


@scores
@pytest.mark.parametrize("key_heads", [6, 3])
def test_attention_is_the_softmax_of_the_scores(
    build: Callable[[], AlignmentScore], key_width: int, key_heads: int
) -> None:
    score = build().double()
    query, key = pair(key_width, key_heads)
    value = torch.randn(2, key_heads, 4, 3, dtype=torch.float64)
    spread = value.repeat_interleave(6 // key_heads, 1)
    expected = by_loops(score, query, key).softmax(-1) @ spread
    torch.testing.assert_close(score.attend(query, key, value), expected)


@scores
def test_attention_with_a_mask_and_a_bias(
    build: Callable[[], AlignmentScore], key_width: int
) -> None:
    score = build().double()
    query, key = pair(key_width)
    value = torch.randn(2, 6, 4, 3, dtype=torch.float64)
    mask = causal() & padding(torch.tensor([4, 2]))
    allowed = mask.tensor(3, 4)
    for shape in ((4,), (3, 4), (2, 3, 4), (1, 6, 3, 4), (2, 1, 3, 4)):
        bias = torch.randn(shape, dtype=torch.float64)
        four = bias[:, None] if bias.ndim == 3 else bias
        logits = (by_loops(score, query, key) + four).masked_fill(~allowed, -math.inf)
        got = score.attend(query, key, value, mask=mask, bias=bias)
        torch.testing.assert_close(got, logits.softmax(-1) @ value)


@pytest.mark.parametrize("name", [name for name in SCORES if "head" not in name])
@pytest.mark.parametrize("axes", [2, 3, 5])
def test_attention_with_other_leading_axes(name: str, axes: int) -> None:
    build, key_width = SCORES[name]
    score = build().double()
    lead = (2, 3, 6)[: axes - 2]
    query = torch.randn(*lead, 3, 5, dtype=torch.float64)
    key = torch.randn(*lead, 4, key_width, dtype=torch.float64)
    value = torch.randn(*lead, 4, 7, dtype=torch.float64)
    expected = score(query, key).softmax(-1) @ value
    torch.testing.assert_close(score.attend(query, key, value), expected)
    if axes == 3:
        bias = torch.randn(2, 1, 3, 4, dtype=torch.float64)
        expected = (score(query, key) + bias[:, 0]).softmax(-1) @ value
        torch.testing.assert_close(score.attend(query, key, value, bias=bias), expected)


@scores
def test_attention_trains_the_score(build: Callable[[], AlignmentScore], key_width: int) -> None:
    score = build().double()
    query, key = (t.requires_grad_() for t in pair(key_width))
    value = torch.randn(2, 6, 4, 3, dtype=torch.float64, requires_grad=True)
    inputs = [query, key, value, *score.parameters()]
    upstream = torch.randn(2, 6, 3, 3, dtype=torch.float64)
    got = torch.autograd.grad(score.attend(query, key, value), inputs, upstream)
    plain = score(query, key).softmax(-1) @ value
    for mine, other in zip(got, torch.autograd.grad(plain, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.abs().max() > 0


def test_a_score_of_ones_own_overrides_one_method() -> None:
    class Distance(AlignmentScore):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return -torch.cdist(query, key)

    class Cosine(DotProduct):
        def project(self, query: Tensor, key: Tensor) -> score_module.Projected:
            unit = torch.nn.functional.normalize
            return score_module.Projected(unit(query, dim=-1), unit(key, dim=-1), 3.0, None)

    query, key = pair(5)
    value = torch.randn(2, 6, 4, 3, dtype=torch.float64)
    for score in (Distance(), Cosine()):
        expected = score(query, key).softmax(-1) @ value
        torch.testing.assert_close(score.attend(query, key, value), expected)
    cosine = torch.nn.functional.cosine_similarity(query[:, :, :, None], key[:, :, None], dim=-1)
    torch.testing.assert_close(Cosine()(query, key), 3 * cosine)
    for base in (AlignmentScore(), DotProduct()):
        with pytest.raises(NotImplementedError, match=type(base).__name__):
            base(query, key)


# --- Errors

Q, K = torch.zeros(2, 6, 3, 5), torch.zeros(2, 6, 4, 7)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no query width": (
        lambda: BilinearScore(0, 7),
        r"query_width \(0\) must be a positive integer",
    ),
    "negative key width": (
        lambda: BilinearScore(5, -7),
        r"key_width \(-7\) must be a positive integer",
    ),
    "half a width": (
        lambda: AdditiveScore(5, 3.5, 2),
        r"key_width \(3.5\) must be a positive integer",
    ),
    "nothing hidden": (lambda: AdditiveScore(5, 7, 0), r"hidden \(0\) must be a positive integer"),
    "no heads": (lambda: BilinearScore(5, 7, heads=0), r"heads \(0\) must be a positive integer"),
    "heads that are true": (lambda: AdditiveScore(5, 7, 2, heads=True), r"heads \(True\) must be"),
    "unequal widths in dot": (
        lambda: DotScore()(Q, K),
        r"query width \(5\) must be key width \(7\).*try BilinearScore\(5, 7\)",
    ),
    "unequal widths in scaled dot": (
        lambda: ScaledDotScore().attend(Q, K, K),
        r"query width \(5\) must be key width \(7\)",
    ),
    "another query width": (
        lambda: BilinearScore(3, 7)(Q, K),
        r"query of shape \(2, 6, 3, 5\) must be 3 wide.*another query_width",
    ),
    "another key width": (
        lambda: BilinearScore(5, 5)(Q, K),
        r"key of shape \(2, 6, 4, 7\) must be 5 wide.*another key_width",
    ),
    "another query width, additive": (
        lambda: AdditiveScore(7, 5, 2)(Q, K),
        r"query of shape \(2, 6, 3, 5\) must be 7 wide",
    ),
    "another key width, additive": (
        lambda: AdditiveScore(5, 3, 2).attend(Q, K, K),
        r"key of shape \(2, 6, 4, 7\) must be 3 wide",
    ),
    "a vector": (
        lambda: BilinearScore(5, 7)(Q[0, 0, 0], K),
        r"query of shape \(5,\) has no length axis",
    ),
    "other heads": (
        lambda: BilinearScore(5, 7, heads=4)(Q, K),
        r"query of shape \(2, 6, 3, 5\) must have 4 heads.*\(..., 4, L, 5\)",
    ),
    "no head axis": (
        lambda: AdditiveScore(5, 7, 2, heads=6)(Q[0, 0], K),
        r"query of shape \(3, 5\) must have 6 heads",
    ),
    "key heads that do not divide": (
        lambda: AdditiveScore(5, 7, 2)(Q, K[:, :4]),
        r"key heads \(4\) must divide query heads \(6\); try 1 or 2 or 3 or 6",
    ),
    "key heads that do not divide, dot": (
        lambda: BilinearScore(5, 7)(Q, K[:, :5]),
        r"key heads \(5\) must divide query heads \(6\)",
    ),
    "another batch": (
        lambda: AdditiveScore(5, 7, 2)(Q, K.repeat(2, 1, 1, 1)[:3]),
        r"leading axes of query \(2, 6\) and key \(3, 6\) must broadcast, but 2 meets 3",
    ),
    "another batch without heads": (
        lambda: BilinearScore(5, 7)(Q[0], K[0, :4]),
        r"leading axes of query \(6,\) and key \(4,\) must broadcast, but 6 meets 4",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
