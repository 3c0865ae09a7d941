"""Picks the backend that computes attention, in one place, with the reason.

The thresholds come from `bench/attention.py` on an H200 (bfloat16) and on two CPU cores.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from regard.attention.arguments import Arguments
from regard.attention.backends import flash, flex, ranges, sequences
from regard.attention.backends.sdpa import fit, shares_heads
from regard.attention.checks import shown
from regard.attention.fusing import fuses
from regard.attention.mask import (
    Band,
    Dense,
    Documents,
    Mask,
    Packing,
    Padding,
)
from regard.attention.notebook import facts
from regard.attention.sync import on_host

TILED = 128
"""Mean length up to which packed sequences share tiles."""
MANY = 264
"""Sequences, times heads, from which each can have a program: two for each processor."""

BACKENDS = ("formula", "sdpa", "packed", "whole", "flex")


class Plan(NamedTuple):
    backend: str
    route: str
    """"formula", or a key of `attend.KERNELS`: the function that does it."""
    reason: str


_HARD = Plan("formula", "formula", "β = ∞ picks the best key, which no fused kernel does")
_EMPTY = Plan("formula", "formula", "there is nothing to compute: an axis has length 0")
_ASKED = Plan("formula", "formula", "it was asked for")
_NONE = Plan("sdpa", "flag", "nothing is masked")
_ONE = Plan("sdpa", "flag", "a single causal query at the end sees every key: no mask needed")
_CAUSAL = Plan("sdpa", "flag", "the causal mask is a kernel flag; no mask is built")
_SHORT = Plan("sdpa", "short", "short narrow sequences run fastest in the memory-efficient kernel")
_WHOLE = Plan("whole", "whole", "sequences are short: a program of our own kernel has a whole one")
_BIAS = Plan("sdpa", "tensor", "a bias is a tensor already; the mask is written into it")
_TENSOR = Plan(
    "sdpa", "tensor", "the mask has no shorter form, or skipping what it hides would not pay"
)
_SHORT_TENSOR = Plan(
    "sdpa", "short_tensor", "on short narrow sequences a mask tensor costs less than skipping"
)
_BAND = Plan("packed", "band", "the mask is a band around the diagonal: two numbers for the kernel")
_PADDING = Plan("packed", "padding", "the real keys of each sentence are read as a packed sequence")
_LENGTHS = Plan("packed", "lengths", "sequences lie end to end: the kernel takes their offsets")
_TILES = Plan("packed", "tiles", "sequences are short: several share a tile of our own kernel")
_SEQUENCES = Plan("packed", "sequences", "each sequence is computed where it lies: none is copied")
_RANGES = Plan("packed", "ranges", "each query sees one range of keys: only those are computed")
_BLOCKS = Plan("flex", "blocks", "the mask leaves out whole blocks, which FlexAttention skips")


def choose(given: Arguments, dropout: float, backend: str) -> Plan:
    """The plan for these arguments; `backend` other than "auto" insists on one."""
    query, key, value, mask, beta, bias, _ = given
    B, H, L, K = query.shape
    S, V = key.shape[2], value.shape[3]
    if backend != "auto" and backend not in BACKENDS:
        names = ", ".join(BACKENDS)
        raise ValueError(f"backend ({shown(backend)}) is unknown; choose auto, {names}")
    if backend == "formula":
        return _ASKED
    if not (B and H and L and S and K and V):
        return _EMPTY
    if _is_hard(beta):
        if backend != "auto":
            raise ValueError(f"backend {backend!r} has no β = ∞; use 'auto' or 'formula'")
        return _HARD
    if backend != "auto":
        return _insist(backend, given, dropout)
    if bias is not None:
        return _BIAS
    flag = _flag(mask, L, S)
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        return _on_cuda(given, dropout, flag)
    if flag is not None:
        return flag
    assert mask is not None
    if mask.packing is not None and _has_runs(mask, query):
        return _by_ranges(given, dropout)
    # Smaller problems are done before the rectangles are gathered.
    large = query.device.type == "cpu" and L * S >= 2**16 and dropout == 0
    if large and _has_runs(mask, query) and _pays(mask, query, key):
        return _RANGES
    return _TENSOR


def _by_ranges(given: Arguments, dropout: float) -> Plan:
    query, _, value, mask = given[:4]
    assert mask is not None
    return _SEQUENCES if sequences.takes(query, value, mask, dropout) else _RANGES


def _flag(mask: Mask | None, L: int, S: int) -> Plan | None:
    """The plan that needs no mask at all, if there is one."""
    if mask is None:
        return _NONE
    bands = [part for part in mask.parts if isinstance(part, Band) and _bottom_right(part, L, S)]
    if len(bands) < len(mask.parts) or any(band.left is not None for band in bands):
        return None
    if L == 1:
        return _ONE
    return _CAUSAL if L == S and min(band.right for band in bands) == 0 else None


def _on_cuda(given: Arguments, dropout: float, flag: Plan | None) -> Plan:
    """Half precision on CUDA, where all kernels are available."""
    query, key, value, mask = given[:4]
    B, H, L, K = query.shape
    S, V = key.shape[2], value.shape[3]
    short = max(L, S) <= 64 and max(K, V) <= 128
    narrow = max(K, V) <= 64
    if flag is _NONE and _whole(given, dropout):
        return _WHOLE
    if flag is not None:
        return _SHORT if short and narrow and L > 1 else flag
    assert mask is not None
    training = _trains(query, key, value)
    # FlexAttention has the highest launch overhead, more so if its rule indexes tensors; it
    # pays for large problems alone.
    looks_up = any(isinstance(part, Documents) for part in mask.parts)
    enough = 3e10 if looks_up else 1.5e10
    flexible = (
        dropout == 0
        and min(K, V) >= 16
        and L >= 128  # for fewer queries FlexAttention has another kernel, with more conditions
        and enough <= 4 * B * H * L * S * K
        and compiler_missing(query) is None
        and not isinstance(mask, Dense)
    )
    bands = [part for part in mask.parts if isinstance(part, Band)]
    others = [part for part in mask.parts if not isinstance(part, Band)]
    banded = _flash_takes(bands, mask.packing, L, S)
    fits = max(K, V) <= 256
    match others:
        case []:
            if short and narrow:
                return _SHORT_TENSOR
            wins = (256 if narrow else 4096) <= L and not training
            if banded and fits and not (flexible and wins):
                return _BAND
        case [Packing() as packing] if banded and fits:
            return _TILES if _shares_tiles(packing, given, dropout) else _LENGTHS
        case [Documents(edges=found)] if found is not None and L == S and banded and fits:
            mean = len(found[0]) * L // _count(found)
            wins = mean >= 2048 and not narrow and not training
            if not short and mean >= 64 and not (flexible and wins):
                return _LENGTHS
        case [Padding()] if not bands and fits and not (short and narrow):
            if not (flexible and (2048 if training else 1024) <= L):
                return _PADDING
    if short:
        return _SHORT_TENSOR
    return _BLOCKS if flexible else _TENSOR


def _insist(backend: str, given: Arguments, dropout: float) -> Plan:
    query, key, value, mask, _, bias, _ = given
    L, S = query.shape[2], key.shape[2]
    if backend == "sdpa":
        if bias is not None:
            return _BIAS
        return _flag(mask, L, S) or _TENSOR
    if bias is not None:
        raise ValueError(f"backend {backend!r} takes no bias; use 'auto' or 'sdpa'")
    if backend == "flex":
        if dropout:
            raise ValueError(f"backend 'flex' has no dropout ({dropout}); use 'auto' or 'sdpa'")
        if query.device.type == "cpu" and _trains(query, key, value):
            raise ValueError(
                "backend 'flex' has no gradients on the CPU; use 'auto', or torch.no_grad()"
            )
        return _BLOCKS
    if backend == "whole":
        if mask is None and _whole(given, dropout):
            return _WHOLE
        raise ValueError(
            "backend 'whole' trains many short sequences that attend to themselves, in half "
            "precision on CUDA with Triton, without mask and dropout; use 'auto'"
        )
    if mask is None:
        raise ValueError("backend 'packed' needs a mask such as packed(lengths); use 'auto'")
    half_on_cuda = query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16)
    if half_on_cuda:
        plan = _packed_plan_on_cuda(mask, given)
        if plan is not None:
            return plan
    if _has_runs(mask, query):
        return _by_ranges(given, dropout)
    raise ValueError(
        f"backend 'packed' cannot express {mask}: some query's keys are not one range; use 'auto'"
    )


def _packed_plan_on_cuda(mask: Mask, given: Arguments) -> Plan | None:
    L, S = given.query.shape[2], given.key.shape[2]
    bands = [part for part in mask.parts if isinstance(part, Band)]
    others = [part for part in mask.parts if not isinstance(part, Band)]
    if not _flash_takes(bands, mask.packing, L, S):
        return None
    match others:
        case []:
            return _BAND
        case [Packing()]:
            return _LENGTHS
        case [Documents(edges=found)] if found is not None and L == S:
            return _LENGTHS
        case [Padding()] if not bands:
            return _PADDING
    return None


def _flash_takes(bands: list[Band], packing: Packing | None, L: int, S: int) -> bool:
    """True if FlashAttention's window expresses these bands."""
    if not all(_bottom_right(band, L, S) for band in bands):
        return False
    # It drops a limit as far out as there are keys, which is wrong for queries before the first.
    if packing is not None:
        ahead = packing.query is not packing.source
        S = packing.source.longest
    else:
        ahead = L > S
    return not (ahead and bands and min(band.right for band in bands) >= S)


def _whole(given: Arguments, dropout: float) -> bool:
    """True if a program can hold a whole sequence, and there are enough sequences."""
    query, key, value = given[:3]
    B, H = query.shape[:2]
    if dropout or B * H < MANY or not _trains(query, key, value) or not fuses(query):
        return False
    from regard.attention.backends import whole  # needs Triton

    return whole.takes(query, key, value)


def _shares_tiles(packing: Packing, given: Arguments, dropout: float) -> bool:
    """True if packed sequences are short enough to share tiles."""
    query, key, value, mask = given[:4]
    assert mask is not None
    mean = max(packing.query.total, packing.source.total) / max(1, len(packing.query))
    width = max(query.shape[3], value.shape[3])
    return (
        fuses(query)
        and dropout == 0
        and mean <= TILED
        and width <= 128
        and flash.edges(mask) in ((-1, -1), (-1, 0))
    )


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _bottom_right(band: Band, L: int, S: int) -> bool:
    offset = band.offset
    return offset is None or (isinstance(offset, int) and offset == S - L)


def _has_runs(mask: Mask, query: Tensor) -> bool:
    """True if the mask is one range of keys for each query, which the host can compute."""
    if query.device.type not in ("cpu", "cuda") or not mask.ranges:
        return False
    return all(tensor.device.type == "cpu" for tensor in mask.tensors)


def _pays(mask: Mask, query: Tensor, key: Tensor) -> bool:
    """True if the rectangles leave out enough; under torch.compile they are always used."""
    if torch.compiler.is_compiling():
        return True
    covered = ranges.divide(mask, query, key).covered
    return covered < (0.85 if query.shape[2] * key.shape[2] >= 2**20 else 0.5)


def _is_hard(beta: float | Tensor) -> bool:
    if isinstance(beta, Tensor):
        return on_host(beta) and bool(torch.isinf(beta).any())
    return beta == math.inf


def _count(edges: tuple[Tensor, Tensor]) -> int:
    first = edges[0]
    return int((first == torch.arange(first.shape[1])).sum())


def compiler_missing(query: Tensor) -> str | None:
    """The tool that compiling for the query's device lacks, or None."""
    if torch.compiler.is_compiling():
        return None  # a compiler is available, and the check would break the graph
    return flex.missing(query.device.type)


class Explanation(str):
    """A plan in words, with its parts as attributes."""

    backend: str
    kernel: str
    reason: str

    @classmethod
    def of(cls, plan: Plan, given: Arguments, dropout: float) -> "Explanation":
        kernel = _kernel(plan, given, dropout)
        words = f"{plan.backend}: {kernel}, because {plan.reason}"
        missing = compiler_missing(given.query)
        if missing:
            words += f"; {missing} was not found, so kernels run eagerly, uncompiled"
        self = cls(words)
        self.backend, self.kernel, self.reason = plan.backend, kernel, plan.reason
        return self

    def _repr_html_(self) -> str:
        rows = {"backend": self.backend, "kernel": self.kernel, "because": self.reason}
        return facts("attend", rows)


_NAMES = {
    SDPBackend.MATH: "plain matrix products",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.CUDNN_ATTENTION: "cuDNN attention",
    SDPBackend.OVERRIDEABLE: "the device's own attention",
}


def _kernel(plan: Plan, given: Arguments, dropout: float) -> str:
    match plan.route:
        case "formula":
            return "plain matrix products with the whole L x S matrix"
        case "short" | "short_tensor":
            return "memory-efficient attention"
        case "band":
            return "FlashAttention with a window"
        case "padding" | "lengths":
            return "FlashAttention for variable lengths"
        case "tiles" | "whole":
            return "a Triton kernel of Regard's own"
        case "sequences":
            return "a C++ kernel of Regard's own"
        case "blocks":
            compiled = "uncompiled" if compiler_missing(given.query) else "compiled for this mask"
            return f"FlexAttention, {compiled}"
    query, key, value = fit(given.query, given.key, given.value)
    allowed = None
    if plan.route == "tensor":
        B, H, L, _ = query.shape
        dtype = torch.bool if given.bias is None else query.dtype
        allowed = torch.empty(1, 1, 1, 1, dtype=dtype, device=query.device)
        allowed = allowed.expand(B, H, L, key.shape[2])
        if given.bias is not None and given.bias.requires_grad:
            allowed = allowed.detach().requires_grad_()
    choice = torch._fused_sdp_choice(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=plan is _CAUSAL,
        enable_gqa=shares_heads(query, key),
    )
    name = _NAMES[SDPBackend(choice)]
    return f"{name} on ranges of keys" if plan.route == "ranges" else name
