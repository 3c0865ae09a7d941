"""`attention_statistics` beside the fused forward pass: its time, and its memory."""

import argparse
import subprocess
import sys

import torch
import torch.nn.functional as F

from bench.timing import Run, replays
from regard.attention.mask import Mask, causal, padding, window
from regard.attention.weights import attention_statistics

MEMORY = """
from pathlib import Path
import torch
from regard import attention_statistics as statistics

def peak():  # of this process alone: what getrusage says includes its parent's
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

q, k = (torch.randn(1, {heads}, {length}, 64) for _ in range(2))
statistics(q[:, :, :64], k[:, :, :64])
before = peak()
statistics(q, k)
print(peak() - before)
"""


def against_forward(L: int, K: int) -> None:
    q, k, v = (torch.randn(1, L, 8, K, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    masks: dict[str, Mask | None] = {
        "none": None,
        "causal": causal(),
        "padding": padding(torch.tensor([L - 7])),
        "window": window(L // 16),
    }
    for name, mask in masks.items():
        flag = name == "causal"
        forward = Run(lambda f=flag: F.scaled_dot_product_attention(q, k, v, is_causal=f))  # type: ignore[misc]
        ours = Run(lambda m=mask: attention_statistics(q, k, m).entropy)  # type: ignore[misc]
        took = replays({"forward": forward, "ours": ours}, calls=2)
        what = "causal forward" if flag else "full forward"
        ratio = took["ours"] / took["forward"]
        print(f"statistics {name:8s} L {L:6d}  K {K:4d}  {ratio:5.2f} x the {what}", flush=True)


def memory(heads: int, length: int) -> None:
    script = MEMORY.format(heads=heads, length=length)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    matrix = heads * length * length * 4 / 2**20
    print(
        f"statistics of {heads} heads x {length}^2 on the CPU: {float(run.stdout):.0f} MiB beyond "
        f"its inputs; the matrix alone would take {matrix:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384)
    options = parser.parse_args()
    if torch.cuda.is_available():
        with torch.no_grad():
            for K in (64, 128):
                against_forward(options.length, K)
    else:
        memory(8, options.length)


if __name__ == "__main__":
    main()
