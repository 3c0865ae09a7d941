"""Whole training steps on a GPU, beside the peers as their users run them.

    python -m bench.steps [translation] [vision] [language]
    python -m bench.steps command --source train.en --target train.de

Everybody trains in the same mixed precision: bfloat16 products by autocast, float32 weights, fused
AdamW, the gradient clipped at norm 1. A step is everything from a batch on the host to changed
weights. Ours is the step that `regard train` replays, on batches that differ; the peers get one
batch again and again, eager, compiled, and compiled with CUDA graphs (mode="reduce-overhead").

    translation   the base Transformer (6 + 6 layers, width 512, 16,000 tokens), sentences of 20 to
                  40 tokens; peers: nn.Transformer and HF Marian, padded. Real target tokens count.
    vision        ViT-B/16, 256 images of 224 pixels; peers: timm, HF ViT
    language      12 layers, width 768, 32 windows of 1,024 tokens; the peer is written here as
                  nanoGPT does it: causal SDPA on a plain batch, logits in one piece
    command       `regard train translate` on a corpus, tiny and base, with nothing else set: its
                  speed as it says itself at its end, beside the bare step on the same batches
"""

import argparse
import gc
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import Batch as Drawn
from bench.models import System, hf_vit, marian, timm_vit, torch_translator
from regard.data.batch import (
    Batch,
    LanguageBatch,
    MixedBatch,
    Side,
    Sizes,
    Tensors,
    capacity,
    language_batch,
    text_batch,
)
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import Transformer, TransformerConfig
from regard.model.vit import VisionTransformer
from regard.task import translate
from regard.task.settings import Preset
from regard.train import capture, optimizer
from regard.train.capture import CapturedStep
from regard.train.config import TrainingConfig
from regard.train.distributed import World
from regard.train.loader import MicroBatch
from regard.train.loss import cross_entropy
from regard.train.step import Numbers, Objective, Parts

VOCABULARY, SMOOTHING, LR = 16_000, 0.1, 1e-4
BATCHES = 4
CUDA = torch.device("cuda")
ALONE = World(rank=0, size=1, local=0, device=CUDA)


@dataclass
class Result:
    seconds: float
    gigabytes: float
    losses: list[float]


# Ours


class Ours:
    """A model and its batches as a task, of which training steps see the model, batches and loss.

    `plan`, scores and files are asked for by `fit` alone.
    """

    score, unit = "loss", "tokens"
    signatures: dict[str, str] = {}  # noqa: RUF012

    def __init__(
        self, model: nn.Module, batches: list[Tensors], loss: Callable[[Any], tuple[Tensor, Tensor]]
    ):
        self.model, self.batches, self.loss = model, batches, loss

    def plan(self, epoch: int) -> list[np.ndarray]:
        return [np.array([n]) for n in range(len(self.batches))]

    def batch(self, indices: np.ndarray, step: int) -> Tensors:
        return self.batches[int(indices[0])]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}

    def files(self) -> dict[str, bytes | Path]:
        return {}

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> dict[str, Any]:
        return {}


def ours(task: Ours, size: Sizes, rounds: int) -> Result:
    """The captured step of `regard train`, without what it does now and then."""
    config = TrainingConfig(lr=LR, steps=1)
    model = task.model.to(CUDA).train()
    parts = Parts(
        task,
        Objective(task),
        dict(model.named_parameters()),
        optimizer.make(model, config),
        torch.amp.GradScaler("cuda", enabled=False),
        None,
        config,
        ALONE,
        torch.bfloat16,
    )
    filled = [batch.fill(size) for batch in task.batches]
    made = [MicroBatch(batch.pin(), True, True) for batch in filled if batch is not None]
    step = CapturedStep(parts, size, print)

    def run(n: int) -> Tensor:
        torch.manual_seed(n)
        step.begin(Numbers(LR, 0.0, 0.0, 0.0, 0.0))
        step.backward(made[n % len(made)], 0, True)
        row = step.update()
        return row[0] / row[1]

    with step.running():
        return _measured(run, rounds)


# Peers


def peer(system: System, mode: str, rounds: int) -> Result:
    model = system.model.to(CUDA).train()
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, LR, (0.9, 0.98), fused=True)
    compiled: Any = model
    if mode == "compiled":
        compiled = torch.compile(model)
    elif mode == "graphs":
        compiled = torch.compile(model, mode="reduce-overhead")

    def run(n: int) -> Tensor:
        torch.manual_seed(n)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            loss = system.loss(compiled(*system.inputs))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()
        return loss.detach().clone()

    return _measured(run, rounds)


def _measured(run: Callable[[int], Tensor], rounds: int) -> Result:
    """The median over rounds of ten steps; losses of the first fifty."""
    torch.cuda.reset_peak_memory_stats()
    losses = [run(n) for n in range(50)]
    torch.cuda.synchronize()
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for n in range(10):
            run(n)
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) / 10)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Result(statistics.median(took), peak, [float(loss) for loss in losses])


# Subjects


def translation(sentences: int) -> tuple[Ours, Sizes, dict[str, Callable[[], System]], float]:
    """Systems, and the number of real target tokens of a batch."""
    rng = np.random.default_rng(0)

    def drawn() -> list[tuple[np.ndarray, np.ndarray]]:
        sizes = rng.integers(20, 41, (sentences, 2))
        return [tuple(rng.integers(4, VOCABULARY, n) for n in pair) for pair in sizes]  # type: ignore[misc]

    batches = [text_batch(drawn(), 1, 2) for _ in range(BATCHES)]
    model = Transformer(TransformerConfig.base(VOCABULARY))

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        memory = model.encode(batch.source, batch.source_lengths)
        states = model.states(batch.target, memory, batch.target_lengths, batch.source_lengths)
        return cross_entropy(states, model.output, batch.labels, SMOOTHING), batch.tokens

    size = capacity(
        Sizes(sentences, (_side(batch.source_lengths), _side(batch.target_lengths)))
        for batch in batches
    )
    padded = Drawn.draw(sentences, "cuda")
    peers = {
        "nn.Transformer": lambda: torch_translator(padded),
        "HF Marian": lambda: marian(padded),
    }
    mean = statistics.mean(int(batch.tokens) for batch in batches)
    # Peers' batches are as long on average: they are compared by tokens.
    return Ours(model, list(batches), loss), size, peers, mean / float(padded.target_lengths.sum())


def _side(lengths: Any) -> Side:
    return Side(lengths.total, lengths.longest)


def vision() -> tuple[Ours, Sizes, dict[str, Callable[[], System]], float]:
    B = 256
    pixels, labels = torch.randn(B, 3, 224, 224), torch.randint(1000, (B,))
    ones, count = torch.ones(B), torch.tensor(B)
    batches: list[Tensors] = [MixedBatch(pixels, labels, labels, ones, count)]
    model = VisionTransformer.base(1000)

    def loss(batch: MixedBatch) -> tuple[Tensor, Tensor]:
        logits = model(batch.inputs).float()
        found = F.cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=SMOOTHING)
        return found, batch.tokens

    data = pixels.to(CUDA), labels.to(CUDA)
    peers = {"timm": lambda: timm_vit(*data), "HF ViT": lambda: hf_vit(*data)}
    return Ours(model, batches, loss), Sizes(B, ()), peers, 1.0


def language() -> tuple[Ours, Sizes, dict[str, Callable[[], System]], float]:
    B, T, N = 32, 1024, 32_000
    rng = np.random.default_rng(0)
    texts = rng.integers(4, N, (BATCHES * B, T))
    windows = np.stack([np.arange(BATCHES * B), np.zeros(BATCHES * B), np.full(BATCHES * B, T)], 1)
    batches = [
        language_batch(lambda i: texts[i], windows[n * B : (n + 1) * B].astype(int), 1, 2)
        for n in range(BATCHES)
    ]
    shape = {"width": 768, "heads": 12, "feed_forward": 3072, "layers": 12, "dropout": 0.0}
    config = LanguageConfig(N, activation="gelu", norm="pre", position="learned", **shape)  # type: ignore[arg-type]
    model = LanguageModel(config)

    def loss(batch: LanguageBatch) -> tuple[Tensor, Tensor]:
        states = model.states(batch.inputs, lengths=batch.lengths)
        return cross_entropy(states, model.output, batch.labels, 0.0), batch.tokens

    size = Sizes(B, (Side(B * T, T),))
    ids = torch.from_numpy(texts[:B]).to(CUDA)
    labels = ids.roll(-1, 1)
    peers = {"as nanoGPT": lambda: System(Plain(N), (ids,), _plain_loss(labels))}
    return Ours(model, list(batches), loss), size, peers, 1.0


class Plain(nn.Module):
    """GPT-2's small model, written as directly as torch allows."""

    def __init__(self, vocabulary: int, width: int = 768, layers: int = 12, length: int = 1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PlainBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int = 12):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.reduce = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        parts = self.projected(self.norm_1(x)).view(B, T, 3, self.heads, -1)
        query, key, value = parts.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(B, T, D))
        return x + self.reduce(F.gelu(self.expand(self.norm_2(x))))


def _plain_loss(labels: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda logits: F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# The command


def command(options: argparse.Namespace, size: Preset) -> None:
    """The speed of the command, after its start, beside that of the bare step."""
    config = replace(
        translate.TASK.preset_on(size, CUDA), source=(options.source,), target=(options.target,)
    )
    task = translate.build(config)
    plan = [task.batch(part, n) for n, part in enumerate(task.plan(0)[: 4 * BATCHES])]
    bare = Ours(task.model, list(plan), task.loss)
    held = capture.capacity(task, config.training, ALONE)
    tokens = statistics.mean(int(batch.tokens) for batch in plan)
    alone = tokens / ours(bare, held, options.rounds).seconds
    del task, bare
    _free()
    words = ["--source", options.source, "--target", options.target, "--size", size]
    limits = [f"--training.{n}={options.steps}" for n in ("steps", "evaluate-every", "save-every")]
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, "-m", "regard", "train", "translate", f"{folder}/run"]
        arguments = [*train, *words, *limits, "--judged", "8"]
        output = subprocess.check_output(arguments, stderr=subprocess.STDOUT, text=True)
    match = re.search(r"and ([\d,]+) tokens a second while training", output)
    assert match is not None, output
    speed = float(match[1].replace(",", ""))
    print(
        f"regard train translate --size {size}: {speed:,.0f} target tokens/s, of the bare step's "
        f"{alone:,.0f} {speed / alone:.2f}",
        flush=True,
    )


# Report


def report(
    title: str,
    subject: tuple[Ours, Sizes, dict[str, Callable[[], System]], float],
    options: argparse.Namespace,
) -> None:
    task, size, peers, share = subject
    rounds = options.rounds
    first = ours(task, size, rounds)
    del task
    _free()
    print(
        f"{title}\n  ours: {first.seconds * 1e3:.2f} ms, {first.gigabytes:.2f} GiB, {_shown(first)}"
    )
    for name, make in peers.items():
        for mode in options.modes if not options.peers or name in options.peers else ():
            try:
                torch.manual_seed(0)
                found = peer(make(), mode, rounds)
            except ImportError as error:
                print(f"  {name} is left out: {error}")
                break
            ratio = found.seconds * share / first.seconds
            print(
                f"  {name}, {mode}: {found.seconds * 1e3:.2f} ms, {found.gigabytes:.2f} GiB, "
                f"{_shown(found)}; ours is {ratio:.2f} × as fast, with "
                f"{first.gigabytes / found.gigabytes:.2f} × its memory",
                flush=True,
            )
            _free()


def _shown(result: Result) -> str:
    return f"loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}"


def _free() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", default=["translation", "vision", "language"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled", "graphs"])
    parser.add_argument("--peers", nargs="+", help="these alone, such as timm")
    parser.add_argument("--sentences", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--source", help="for command")
    parser.add_argument("--target", help="for command")
    parser.add_argument("--steps", type=int, default=1000, help="of the command")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "base"], help="for command")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if "translation" in options.subjects:
        for sentences in options.sentences:
            title = f"Base Transformer, {sentences} sentences"
            report(title, translation(sentences), options)
    if "vision" in options.subjects:
        report("ViT-B/16, 256 images", vision(), options)
    if "language" in options.subjects:
        report("Language model", language(), options)
    if "command" in options.subjects:
        for size in options.sizes:
            command(options, size)


if __name__ == "__main__":
    main()
