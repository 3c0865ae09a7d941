"""`attend` beside the best SDPA kernel called directly, and beside FlexAttention.

Every competitor gets what it likes best, ready made: SDPA its causal flag or a boolean mask with
broadcast axes, FlexAttention a block mask and a compilation for this very shape. Outputs are
compared before anything is timed. Ratios are times divided by ours: above 1, ours is faster.

On CUDA `graph` compares the kernels alone, captured in a graph; `added` is what a plain call from
Python takes beyond the best direct one, which matters where that takes less than a millisecond.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.timing import Run, replays, turns
from regard.attention.attend import attend, explain_attention
from regard.attention.backends import flex
from regard.attention.mask import Mask, causal, documents, padding, window

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def problems(B: int, L: int, device: str) -> dict[str, Mask | None]:
    """The masks of the comparison; a window of L/16 to each side, eight documents."""
    lengths = torch.randint(L // 2, L + 1, (B,)).to(device)
    ids = (torch.arange(L) * 8 // L).expand(B, L)
    return {
        "none": None,
        "causal": causal(),
        "padding": padding(lengths),
        "causal & padding": causal() & padding(lengths),
        "window": window(max(8, L // 16)),
        "documents": documents(ids),
    }


def direct(q: Tensor, k: Tensor, v: Tensor, name: str, mask: Mask | None) -> dict[str, Run]:
    """SDPA by each kernel that takes this mask."""
    L, S = q.shape[2], k.shape[2]
    options: dict[str, Any] = {}
    if name == "causal":
        options["is_causal"] = True
    elif mask is not None:
        options["attn_mask"] = mask.compact(L, S, q.device)
    call = lambda: F.scaled_dot_product_attention(q, k, v, **options)  # noqa: E731
    if q.device.type == "cpu":
        return {"SDPA": Run(call)}
    able = {}
    for kernel, backend in KERNELS.items():
        run = Run(call, lambda chosen=backend: sdpa_kernel([chosen]))  # type: ignore[misc]
        try:
            with run.context():
                call()
        except RuntimeError:
            continue
        able[kernel] = run
    return able


def flexible(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    L, S, block_mask = q.shape[2], k.shape[2], None
    if mask is not None:
        there = mask.to(q.device)
        there.compact(1, S, q.device)
        B = None if mask.batch == 1 else mask.batch
        # Only CUDA compiles this reliably; it is not timed.
        create = torch.compile(create_block_mask) if q.is_cuda else create_block_mask
        block_mask = create(
            lambda b, h, i, j: there.rule(there.frame(b, h, i, j, S - L)), B, None, L, S, q.device
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return Run(lambda: compiled(q, k, v, block_mask=block_mask))


def compare(
    device: str, dtype: torch.dtype, B: int, H: int, L: int, K: int, with_flex: bool
) -> list[dict[str, Any]]:
    torch.manual_seed(L)
    q, k, v = (torch.randn(B, L, H, K, dtype=dtype).to(device).transpose(1, 2) for _ in range(3))
    found = []
    for name, mask in problems(B, L, device).items():
        ours = Run(lambda m=mask: attend(q, k, v, m))  # type: ignore[misc]
        theirs = direct(q, k, v, name, mask)
        rivals = dict(theirs)
        if with_flex:
            rivals["flex"] = flexible(q, k, v, mask)
        expected = ours.call()
        for rival, run in rivals.items():
            with run.context():
                error = (run.call() - expected).norm() / expected.norm()
            assert error < 0.02, f"{rival} differs by {error:.3f} at {name}, L = {L}, K = {K}"
        row = {"mask": name, "L": L, "K": K, "by": explain_attention(q, k, v, mask).backend}
        if device == "cuda":
            captured = replays({"ours": ours, **rivals}, calls=6 if L < 8192 else 2)
            best = min(theirs, key=lambda kernel: captured[kernel])
            called = turns({"ours": ours, best: theirs[best]}, rounds=5)
            row |= {
                "best": best,
                "graph": captured[best] / captured["ours"],
                "eager": called[best] / called["ours"],
                "added": (called["ours"] - called[best]) * 1e6,
                "long": called[best] > 1e-3,
            }
            if with_flex:
                row["flex"] = captured["flex"] / captured["ours"]
        else:
            took = turns({"ours": ours, **rivals}, rounds=5 if L < 8192 else 3)
            row |= {"best": "SDPA", "eager": took["SDPA"] / took["ours"]}
            if with_flex:
                row["flex"] = took["flex"] / took["ours"]
        found.append(row)
        print(line(row), flush=True)
    return found


def line(row: dict[str, Any]) -> str:
    text = f"{row['mask']:17s} L {row['L']:6d}  K {row['K']:4d}  {row['by']:7s}"
    text += f"  best direct {row['best']:9s}"
    if "graph" in row:
        text += f"  graph {row['graph']:6.2f}x"
    text += f"  call {row['eager']:6.2f}x"
    if "added" in row and not row["long"]:
        text += f" ({row['added']:+6.1f} us)"
    if "flex" in row:
        text += f"  flex {row['flex']:6.2f}x"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    print(f"attend: {torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__},")
    print(f"{dtype}, times divided by ours")
    torch._dynamo.config.recompile_limit = 256
    flex.EXACT = 256  # each problem stands for a program that has few
    with torch.no_grad():
        for K in options.widths:
            for L in options.lengths:
                tokens = 16384 if cuda else 4096
                B = max(1, tokens // L)
                H = 16 if cuda else 8 if L <= 4096 else 2
                # On a CPU FlexAttention takes seconds to compile and, beyond this, to run.
                with_flex = not options.no_flex and (cuda or L <= 1024)
                compare(device, dtype, B, H, L, K, with_flex)


if __name__ == "__main__":
    main()
