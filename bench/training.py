"""Training a translator beside the loops that one would write around other models.

    python -m bench.training --source train.en.gz --target train.de.gz [--precision bf16]

Real sentences, cut by one tokenizer, in the same batches by token budget. Ours gets them packed;
nn.Transformer and HF Marian get them padded, which costs them little, because a batch holds
sentences of like length. All have one shape, post-norm, dropout 0.1, label smoothing 0.1, the
gradient clipped at norm 1, and fused AdamW; bf16 is autocast's, for all. A step is everything from
a batch to changed weights. Speeds count real target tokens. Peak memory is that of a process of its
own for each system, above what it held before its first step.
"""

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import TorchTransformer, marian_model
from regard.data.batch import Batch
from regard.model.transformer import TransformerShape
from regard.task import translate

NAMES = ("ours", "nn.Transformer", "HF Marian")
SMOOTHING = 0.1


@dataclass(frozen=True)
class Padded:
    """A batch as the others want it."""

    source: Tensor
    real: Tensor
    """True at real source tokens."""
    target: Tensor
    labels: Tensor
    """-100 at what only fills up."""

    @classmethod
    def of(cls, batch: Batch) -> "Padded":
        assert batch.source_lengths is not None

        def rows(tokens: Tensor, lengths: list[int], filling: int = 0) -> Tensor:
            return nn.utils.rnn.pad_sequence(tokens[0].split(lengths), True, filling)

        S, T = batch.source_lengths.lengths.tolist(), batch.target_lengths.lengths.tolist()
        source = rows(batch.source, S)
        real = torch.arange(source.shape[1]) < batch.source_lengths.lengths[:, None]
        return cls(source, real, rows(batch.target, T), rows(batch.labels, T, -100))


def system(
    name: str, task: translate.Translation
) -> tuple[nn.Module, Callable[[Batch, Padded], Tensor]]:
    """A model, and the mean loss of a batch."""
    config = task.model.config
    shape = (config.vocabulary, config.width, config.heads)
    shape = (*shape, config.encoder_layers, config.feed_forward)
    if name == "ours":

        def mean(batch: Batch, padded: Padded) -> Tensor:
            loss, count = task.loss(batch)
            return loss / count

        return task.model, mean
    torch.manual_seed(0)
    model = TorchTransformer(*shape) if name == "nn.Transformer" else marian_model(*shape)

    def loss(batch: Batch, padded: Padded) -> Tensor:
        if name == "nn.Transformer":
            T = padded.target.shape[1]
            future = torch.ones(T, T, dtype=torch.bool).triu(1)
            logits = model(padded.source, padded.target, ~padded.real, future)
        else:
            logits = model(padded.source, padded.real.long(), padded.target)
        return F.cross_entropy(
            logits.flatten(0, 1), padded.labels.flatten(), label_smoothing=SMOOTHING
        )

    return model, loss


def trainer(name: str, task: translate.Translation, half: bool) -> Callable[[Batch, Padded], float]:
    """One whole step."""
    model, loss_of = system(name, task)
    adam = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.98), fused=True)
    model.train()

    def step(batch: Batch, padded: Padded) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = loss_of(batch, padded)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        return float(loss)

    return step


def peak() -> float:
    """GiB that this process has held at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--batch", type=int, default=2048, help="tokens of both sides")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--memory", choices=NAMES, help="print one system's peak, and no more")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    half = options.precision == "bf16"
    width, layers = options.width, options.layers
    config = translate.preset("tiny")
    config = replace(
        config,
        source=(options.source,),
        target=(options.target,),
        model=TransformerShape(
            width=width,
            heads=width // 64,
            feed_forward=2 * width,
            encoder_layers=layers,
            decoder_layers=layers,
            dropout=0.1,
        ),
        training=replace(config.training, batch=options.batch, smoothing=SMOOTHING),
    )
    task = translate.build(config)
    plan = task.plan(0)[: options.batches]
    batches = [task.batch(indices, step) for step, indices in enumerate(plan)]
    pairs = [(batch, Padded.of(batch)) for batch in batches]
    if options.memory:
        step, before = trainer(options.memory, task, half), peak()
        for pair in pairs:
            step(*pair)
        print(f"{peak() - before:.2f}")
        return

    filled = sum(p.target.numel() for _, p in pairs) / sum(int(b.tokens) for b in batches) - 1
    print(f"{len(pairs)} batches of {options.batch} tokens; padding adds {filled:.0%} to targets")
    steps = {name: trainer(name, task, half) for name in NAMES}
    for name, step in steps.items():
        first = step(*pairs[0])
        print(f"  {name}: loss of the first batch {first:.3f}")
    took: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(options.rounds):
        for pair in pairs:  # in turn, batch by batch, so that a busy moment meets all alike
            for name, step in steps.items():
                begin = time.perf_counter()
                step(*pair)
                took[name].append((time.perf_counter() - begin) / int(pair[0].tokens))
    speeds = {name: 1 / statistics.median(times) for name, times in took.items()}
    for name, speed in speeds.items():
        command = [sys.executable, "-m", "bench.training", *sys.argv[1:], "--memory", name]
        memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        ratio = f"ours is {speeds['ours'] / speed:.2f} ×" if name != "ours" else ""
        print(f"  {name}: {speed:,.0f} target tokens/s, {memory} GiB {ratio}", flush=True)


if __name__ == "__main__":
    main()
