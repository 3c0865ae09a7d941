"""`scaled_dot_product_attention` beside torch's own, over the whole of its signature.

The cases are those that torch tests its own function with, as far as they apply to any
implementation: shapes from two axes to five, masks of every kind and rank, alignment of the causal
flag, scales of either sign, grouped heads, empty rows, dropout from one seed, mixed precision,
nested tensors, gradients, tracing and compiling.
"""

import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard import (
    attend,
    attention_weights,
    causal,
    explain_attention,
    scaled_dot_product_attention,
)
from regard.attention.functional import from_torch
from tests.processes import HANG

ROOT = Path(__file__).parent.parent.parent

theirs = F.scaled_dot_product_attention
B, H, L, S, K, V = 2, 6, 5, 7, 11, 13


def problem(
    lead: tuple[int, ...] = (B, H), keys: tuple[int, ...] | None = None, dtype: Any = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    keys = lead if keys is None else keys
    return (
        torch.randn(*lead, L, K, dtype=dtype),
        torch.randn(*keys, S, K, dtype=dtype),
        torch.randn(*keys, S, V, dtype=dtype),
    )


def same(tensors: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Both give the same, gradients of everything included."""
    results = []
    for function in (theirs, scaled_dot_product_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        changed = dict(options)
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            changed["attn_mask"] = mask.clone().requires_grad_()
            leaves.append(changed["attn_mask"])
        torch.manual_seed(1)
        out = function(*leaves[:3], **changed)
        slope = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        results.append((out, *torch.autograd.grad(out, leaves, slope)))
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected)
    return results[1][0]


# Shapes


@pytest.mark.parametrize(
    ("lead", "keys"),
    [
        ((), ()),
        ((H,), (H,)),
        ((B, H), (B, H)),
        ((3, B, H), (3, B, H)),
        ((B, H), (B, 1)),  # multi-query by broadcasting
        ((B, 1), (B, H)),
        ((B, H), ()),
        ((), (B, H)),
        ((1, H), (B, H)),
    ],
)
def test_leading_axes(lead: tuple[int, ...], keys: tuple[int, ...]) -> None:
    same(problem(lead, keys))
    same(problem(lead, keys), is_causal=True)


@pytest.mark.parametrize("lead", [(H,), (B, H), (3, B, H)])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_grouped_heads(lead: tuple[int, ...], groups: int) -> None:
    same(problem(lead, (*lead[:-1], groups)), enable_gqa=True)


def test_grouped_keys_and_values_may_differ() -> None:
    query, key, _ = problem((B, H), (B, 3))
    same((query, key, torch.randn(B, 2, S, V, dtype=torch.float64)), enable_gqa=True)


@pytest.mark.parametrize("axis", ["L", "S"])
def test_empty_axes(axis: str) -> None:
    query, key, value = problem()
    if axis == "L":
        query = query[:, :, :0]
    else:
        key, value = key[:, :, :0], value[:, :, :0]
    expected = theirs(query, key, value)
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value), expected)


# Masks

MASKS = [
    *((lead, (L, S)) for lead in ((), (H,), (B, H), (3, B, H))),
    *((lead, (1, S)) for lead in ((), (H,), (B, H), (3, B, H))),
    ((H,), (H, L, S)),
    ((H,), (1, L, 1)),
    ((B, H), (H, L, S)),
    ((B, H), (B, 1, 1, S)),
    ((B, H), (B, H, L, S)),
    ((B, H), (1, H, L, 1)),
    ((3, B, H), (B, H, L, S)),
    ((3, B, H), (3, 1, 1, L, S)),
    ((3, B, H), (3, 1, H, 1, S)),
]


@pytest.mark.parametrize("kind", ["boolean", "float"])
@pytest.mark.parametrize(("lead", "shape"), MASKS)
def test_masks_broadcast_as_torchs_do(
    lead: tuple[int, ...], shape: tuple[int, ...], kind: str
) -> None:
    allowed = torch.rand(shape) < 0.7
    mask = allowed if kind == "boolean" else torch.randn(shape, dtype=torch.float64)
    same(problem(lead), attn_mask=mask)


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_rows_that_may_attend_to_nothing(kind: str) -> None:
    mask = torch.rand(L, S) < 0.6
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(L, S, dtype=torch.float64).masked_fill(~mask, -math.inf)
    out = same(problem(), attn_mask=mask)
    assert bool((out[:, :, 2] == 0).all())


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 7), (7, 5), (1, 4), (4, 1)])
def test_the_causal_flag_is_aligned_at_the_top_left(queries: int, keys: int) -> None:
    query, key, value = (torch.randn(B, H, n, 8) for n in (queries, keys, keys))
    same((query, key, value), is_causal=True)
    # Which is not where `causal()` stands when lengths differ.
    bottom = attend(query, key, value, mask=causal())
    top = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(bottom, top) == (queries == keys)


def test_flag_and_mask_together_hide_what_either_hides() -> None:
    mask = torch.rand(L, S) < 0.7
    both = mask & torch.ones(L, S, dtype=torch.bool).tril()
    query, key, value = problem()
    expected = theirs(query, key, value, attn_mask=both)
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(found, expected)


# Scale, dropout, dtypes


@pytest.mark.parametrize("scale", [None, 0, 0.0, 0.25, 1, 3.5, -0.5])
def test_scales(scale: float | None) -> None:
    same(problem(), scale=scale)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
def test_dropout_draws_the_same(p: float) -> None:
    query, key, value = problem(dtype=torch.float32)
    same((query, key, value[..., :K]), dropout_p=p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["boolean", "own", "float"])
def test_dtypes_of_tensors_and_masks(dtype: torch.dtype, kind: str) -> None:
    query, key, value = problem(dtype=dtype)
    mask = torch.rand(L, S) < 0.7
    if kind != "boolean":
        mask = torch.randn(L, S, dtype=dtype if kind == "own" else torch.float32)
    expected = theirs(query, key, value, attn_mask=mask)
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(("float32", "bfloat16", "float16"), repeat=3))
)
def test_mixed_dtypes_under_autocast(dtypes: tuple[str, str, str]) -> None:
    tensors = [tensor.to(getattr(torch, name)) for tensor, name in zip(problem(), dtypes)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(*tensors)
        found = scaled_dot_product_attention(*tensors)
        formula = attend(*tensors, backend="formula")
        exact = attention_weights(*tensors[:2])
    assert found.dtype == formula.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(formula, expected, atol=0.02, rtol=0.02)
    # Weights are those of the tensors in autocast's dtype, but computed in float32.
    assert exact.dtype == torch.float32
    rounded = [tensor.bfloat16().float() for tensor in tensors]
    torch.testing.assert_close(exact, attention_weights(*rounded[:2]))


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        same(problem())


def test_mixed_dtypes_without_autocast_are_refused(unchecked: None) -> None:
    query, key, value = problem()
    with pytest.raises(ValueError, match=r"query is torch\.float64 but key is torch\.float32"):
        scaled_dot_product_attention(query, key.float(), value)


# Everything at once


@settings(max_examples=60)
@given(data=st.data())
def test_any_call(data: st.DataObject) -> None:
    draw = data.draw
    gqa = draw(st.booleans())
    batch = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)))
    groups = draw(st.sampled_from([1, 2, 4])) if gqa else 4
    sizes = st.integers(1, 9)
    rows, columns, width, depth = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    query = torch.randn(*batch, 4, rows, width, dtype=torch.float64)
    key = torch.randn(*batch, groups, columns, width, dtype=torch.float64)
    value = torch.randn(*batch, groups, columns, depth, dtype=torch.float64)
    options: dict[str, Any] = {"enable_gqa": gqa}
    options["scale"] = draw(st.sampled_from([None, 0.3, 2.0, -1.0]))
    match draw(st.sampled_from(["none", "causal", "boolean", "float"])):
        case "causal":
            options["is_causal"] = True
        case "boolean":
            options["attn_mask"] = torch.rand(4, rows, columns) < 0.8
        case "float":
            options["attn_mask"] = torch.randn(rows, 1, dtype=torch.float64)
    torch.testing.assert_close(
        scaled_dot_product_attention(query, key, value, **options),
        theirs(query, key, value, **options),
    )


# What torch refuses is refused, in a line that says what to do


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({}, {"dropout_p": 1.2}, r"dropout \(1\.2\)"),
        ({}, {"attn_mask": torch.ones(L, S, dtype=torch.int32)}, r"int32; pass a boolean one"),
        ({}, {"attn_mask": torch.ones(L, S, dtype=torch.float16)}, r"one of torch\.float64"),
        ({}, {"attn_mask": torch.ones(S, dtype=torch.bool)}, r"\(7,\) does not broadcast"),
        ({}, {"attn_mask": torch.ones(3, L, S, dtype=torch.bool)}, r"does not broadcast"),
        ({}, {"attn_mask": torch.ones(1, B, H, L, S) > 0}, r"does not broadcast to \(2, 6, 5, 7\)"),
        ({"key": (B, 3, S, K), "value": (B, 3, S, V)}, {}, r"6, 3, 3 heads.*enable_gqa=True"),
        ({"key": (B, 4, S, K), "value": (B, 4, S, V)}, {"enable_gqa": True}, r"\(4\) must divide"),
        ({"query": (L, K)}, {"enable_gqa": True}, r"enable_gqa needs"),
        ({"query": (K,)}, {}, r"no length axis"),
        ({"value": (B, H, S + 1, V)}, {}, r"7 keys but 8 values"),
        ({"key": (B, H, S, K + 1)}, {}, r"query width \(11\) and key width \(12\)"),
    ],
)
def test_refusals(change: dict[str, tuple[int, ...]], options: dict[str, Any], says: str) -> None:
    tensors = dict(zip(("query", "key", "value"), problem()))
    tensors |= {name: torch.randn(shape, dtype=torch.float64) for name, shape in change.items()}
    with pytest.raises((RuntimeError, IndexError)):
        theirs(*tensors.values(), **options)
    with pytest.raises(ValueError, match=says):
        scaled_dot_product_attention(*tensors.values(), **options)


def test_scale_and_grouping_are_given_by_name(unchecked: None) -> None:
    arguments: Any = (*problem(), None, 0.0, False, 1.0)
    for function in (theirs, scaled_dot_product_attention):
        with pytest.raises(TypeError, match=r"from 3 to 6 positional|pass others by name: scale"):
            function(*arguments)


# Through it, what `regard` can say of any attention


def test_what_regard_calls_the_same() -> None:
    query, key, value = problem()
    found = from_torch(query, key, value, is_causal=True, scale=0.5)
    assert str(found.mask) == "causal(0)"
    assert found.beta == 0.5
    torch.testing.assert_close(attend(*found), theirs(query, key, value, is_causal=True, scale=0.5))
    square = from_torch(query, query, query, is_causal=True)
    assert explain_attention(*square).reason == "the causal mask is a kernel flag; no mask is built"
    exact = attention_weights(found.query, found.key, found.mask, found.beta, found.bias)
    torch.testing.assert_close(exact @ value, attend(*found))


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (theirs, scaled_dot_product_attention):
            self.calls.append(dict(kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_the_call_as_it_was_made_once() -> None:
    query, key, value = problem()
    alone = scaled_dot_product_attention(query, key, value, scale=0.5)
    with Seen() as seen:
        watched = scaled_dot_product_attention(query, key, value, scale=0.5)
    assert seen.calls == [{"scale": 0.5, "enable_gqa": False}]
    assert torch.equal(alone, watched)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_torchs(unchecked: None, layout: torch.layout) -> None:
    pieces = [torch.randn(length, H, 8) for length in (3, 5)]
    if layout is torch.strided:  # which torch takes with the heads before the lengths alone
        nested = torch.nested.nested_tensor([piece.transpose(0, 1) for piece in pieces])
    else:
        nested = torch.nested.nested_tensor(pieces, layout=layout).transpose(1, 2)
    found = scaled_dot_product_attention(nested, nested, nested).unbind()
    for one, piece in zip(found, pieces):
        alone = piece.transpose(0, 1)
        torch.testing.assert_close(one, theirs(alone, alone, alone))


class TheirModel(nn.Module):
    """Somebody's attention, in which one name was changed."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(12, 36), function

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inner(x).view(*x.shape[:2], 3, 2, 6).permute(2, 0, 3, 1, 4)
        return self.function(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def test_somebodys_model_is_as_before() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 12)
    before, after = TheirModel(theirs), TheirModel(scaled_dot_product_attention)
    after.load_state_dict(before.state_dict())
    assert torch.equal(before(x), after(x))


# Tracing, compiling, mapping


def traced(function: Callable[..., Tensor], *sizes: tuple[int, int, int, int]) -> None:
    """Traced with the first sizes, it is right for all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that are compared, and of tracing itself
        trace: Any = torch.jit.trace(function, made(*sizes[0]), check_trace=False)  # type: ignore[no-untyped-call]
        for size in sizes:
            tensors = made(*size)
            torch.testing.assert_close(trace(*tensors), function(*tensors))


def made(heads: int, groups: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    shapes = (heads, queries), (groups, keys), (groups, keys)
    return tuple(torch.randn(B, *shape, 8) for shape in shapes)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}])
def test_tracing(options: dict[str, Any]) -> None:
    square = "is_causal" in options  # where a trace has chosen the flag
    groups = 2 if "enable_gqa" in options else 6
    traced(
        lambda *tensors: scaled_dot_product_attention(*tensors, **options),
        (6, groups, 5, 5 if square else 7),
        (6, groups, 9, 9 if square else 4),
    )


def test_tracing_attend(unchecked: None) -> None:
    traced(lambda q, k, v: attend(q, k, v, mask=causal()), (6, 2, 5, 7), (6, 2, 5, 7))


COMPILED = """
import torch
from regard import attend, causal, padding, scaled_dot_product_attention as ours

def masked(q, k, v):
    return ours(q, k, v, q.new_zeros(q.shape[2], k.shape[2]), enable_gqa=True)

for function in (
    lambda q, k, v: ours(q, k, v, enable_gqa=True),
    lambda q, k, v: ours(q, k, v, is_causal=True, enable_gqa=True),
    masked,
    lambda q, k, v: attend(q, k, v),
    lambda q, k, v: attend(q, k, v, mask=causal()),
    lambda q, k, v: attend(q, k, v, mask=padding([2, 3])),
):
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend="eager")
    for heads, groups, queries, keys in (6, 6, 5, 5), (4, 2, 6, 9):
        shapes = (heads, queries), (groups, keys), (groups, keys)
        tensors = [torch.randn(2, *shape, 8) for shape in shapes]
        torch.testing.assert_close(compiled(*tensors), function(*tensors))
print("all the same")
"""


def test_compiling_with_every_size_dynamic() -> None:
    """In a process of its own, because the compiler cannot see through checked annotations."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all the same\n"


def test_exporting_with_dynamic_sizes(unchecked: None) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    model = TheirModel(scaled_dot_product_attention)
    exported = torch.export.export(
        model, (torch.randn(3, 5, 12),), dynamic_shapes=[{0: batch, 1: length}]
    )
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_mapping(unchecked: None) -> None:
    tensors = problem(dtype=torch.float32)
    torch.testing.assert_close(torch.vmap(scaled_dot_product_attention)(*tensors), theirs(*tensors))
