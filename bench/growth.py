"""What a training step costs as sequences grow longer and models wider, beside nn.Transformer.

    python -m bench.growth [--device cuda] [--tokens 16384] [--svg docs/growth.svg]

Both are four encoder layers, pre-norm, forwards and backwards: float32 on a CPU; on a GPU autocast
to bfloat16, both captured in CUDA graphs, so that Python costs nothing. A batch always has as many
tokens, in fewer sequences where they are longer: what does not depend on the length (projections,
feed-forward) stays, and attention's share grows. A line says milliseconds and GiB of ours and of
the peer, and which fraction ours is of the arithmetic that a plain product of matrices reaches on
this device.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.figures import figure, finish, plain_ticks, save
from bench.timing import Run, turns
from regard.attention import sync
from regard.model.encoder import EncoderConfig, TextEncoder

LAYERS = 4
LENGTHS = (64, 256, 1024, 4096, 16_384)
WIDTHS = (256, 512, 1024, 2048)


class Cost(NamedTuple):
    """Of a step: seconds and bytes of ours and of the peer, and its floating-point operations."""

    place: int
    seconds: tuple[float, float]
    memory: tuple[int, int]
    operations: float


def stacks(width: int) -> tuple[nn.Module, nn.Module]:
    heads, hidden = width // 64, 4 * width
    config = EncoderConfig(
        8, width=width, heads=heads, feed_forward=hidden, layers=LAYERS, norm="pre", dropout=0.0
    )
    layer = nn.TransformerEncoderLayer(
        width, heads, hidden, dropout=0.0, batch_first=True, norm_first=True
    )
    theirs = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(width), enable_nested_tensor=False)
    return TextEncoder(config).encoder, theirs


def cost(place: int, width: int, length: int, tokens: int, device: torch.device) -> Cost:
    shape = (max(1, tokens // length), length, width)
    x = torch.randn(shape, device=device, requires_grad=True)
    models = [model.to(device).train() for model in stacks(width)]

    def step(model: nn.Module) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                out = model(x)
            out.float().square().mean().backward()
            model.zero_grad()
            x.grad = None
            return out

        return call

    steps = {name: step(model) for name, model in zip(("ours", "theirs"), models)}
    memory = tuple(_peak(call, device) for call in steps.values())
    took = turns({name: Run(_captured(call, device)) for name, call in steps.items()}, rounds=5)
    weights = sum(p.numel() for p in models[0].parameters() if p.ndim == 2)
    attention = LAYERS * 2 * 2 * length * width  # scores, and means of values
    operations = 3 * shape[0] * length * (2 * weights + attention)
    return Cost(place, (took["ours"], took["theirs"]), (memory[0], memory[1]), operations)


def _captured(call: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    if device.type != "cuda":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with sync.capture(), torch.cuda.graph(graph, stream=stream):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def _peak(call: Callable[[], object], device: torch.device) -> int:
    """Bytes beyond what is held already; 0 on a CPU, where torch does not count."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - held


def peak_speed(device: torch.device) -> float:
    """Operations a second of one large product."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / turns({"product": Run(lambda: a @ b)}, rounds=5)["product"]


def draw(found: dict[str, list[Cost]], path: Path) -> None:
    counted = any(cost.memory[0] for costs in found.values() for cost in costs)
    units = ("ms", "GiB") if counted else ("ms",)
    made, grid = figure(len(units), len(found), (4.2, 2.6))
    for column, (name, costs) in enumerate(found.items()):
        for row, unit in enumerate(units):
            for n, label in enumerate(("ours", "nn.Transformer")):
                values = [c.seconds[n] * 1e3 if row == 0 else c.memory[n] / 2**30 for c in costs]
                grid[row][column].loglog([c.place for c in costs], values, marker=".", label=label)
            finish(grid[row][column], f"{unit} of a step", name)
            plain_ticks(grid[row][column], [c.place for c in costs])
    grid[0][0].legend(frameon=False, fontsize=9)
    save(made, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--widest", type=int, default=WIDTHS[-1])
    parser.add_argument("--svg", type=Path)
    chosen = parser.parse_args()
    device, tokens = torch.device(chosen.device), chosen.tokens
    best = peak_speed(device)
    print(f"one product of matrices: {best / 1e12:.2f} TFLOP/s")
    sweeps = {
        "length": [(n, 512, n) for n in LENGTHS if n <= chosen.longest],
        "width": [(n, n, 512) for n in WIDTHS if n <= chosen.widest],
    }
    found: dict[str, list[Cost]] = {}
    for name, settings in sweeps.items():
        for place, width, length in settings:
            one = cost(place, width, length, tokens, device)
            found.setdefault(name, []).append(one)
            ours, theirs = one.seconds
            print(
                f"  {name} {place:6,}: {ours * 1e3:9.2f} ms, {one.memory[0] / 2**30:6.2f} GiB; "
                f"nn.Transformer {theirs * 1e3:9.2f} ms, {one.memory[1] / 2**30:6.2f} GiB; "
                f"{theirs / ours:5.2f} × as fast, {one.operations / ours / best:4.0%} of the peak",
                flush=True,
            )
    if chosen.svg is not None:
        draw(found, chosen.svg)


if __name__ == "__main__":
    main()
