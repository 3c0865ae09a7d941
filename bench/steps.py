"""Whole training steps on a GPU, beside the peers at their best settings.

    python -m bench.steps [translation] [vision] [language]
    python -m bench.steps command --source train.en --target train.de

All systems train in the same mixed precision: bfloat16 products by autocast, float32 weights, fused
AdamW, the gradient clipped at norm 1. Ours is the step that `regard train` replays, from a batch on
the host to changed weights, on batches that differ. The peers get one batch on the GPU again and
again, in each of the modes of `MODES`. Ours and a peer take turns; the table at the end has each
subject's fastest peer, its mode, and ratios of the cells that are shown.

    translation   the base Transformer (6 + 6 layers, width 512, 16,000 tokens), sentences of 20 to
                  40 tokens; peers: nn.Transformer and HF Marian, on the same sentences, padded
    vision        ViT-B/16, 256 images of 224 pixels; peers: timm, HF ViT
    language      12 layers, width 768, 32 windows of 1,024 tokens; the peer is written here as
                  nanoGPT does it: causal SDPA on a plain batch, logits in one piece
    command       `regard train translate` on a corpus, tiny and base, with nothing else set: its
                  speed as it says itself at its end, beside the bare step on the same batches
"""

import argparse
import gc
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from bench.models import Batch as PaddedBatch
from bench.models import System, hf_vit, marian, timm_vit, torch_translator
from bench.table import cell, markdown, ratio
from bench.timing import Run, turns
from regard.data.batch import (
    Batch,
    LanguageBatch,
    MixedBatch,
    Side,
    Sizes,
    Tensors,
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


MODES: dict[str, str | None] = {
    "eager": None,
    "compiled": "default",
    "reduce-overhead": "reduce-overhead",
    "captured": "default",
    "captured, cuDNN attention": "default",
}
"""Modes of torch.compile, which gets the model and its loss. In the last two the whole step,
optimizer included, is also captured in one CUDA graph, as ours is."""
CUDNN_FIRST = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


@dataclass
class Trial:
    """A system that has taken its first steps."""

    run: Run
    gigabytes: float
    """At the height of a step, without what was on the device before."""
    losses: list[float]

    def __str__(self) -> str:
        return f"{cell(self.gigabytes)} GiB, loss {self.losses[0]:.3f} → {self.losses[-1]:.3f}"


# Ours


class Ours:
    """A model, its batches and a loss as a task; only `fit` calls the other methods."""

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


def ours(task: Ours, size: Sizes) -> Trial:
    """The captured step of `regard train`, without evaluations and checkpoints."""
    held = _reset_memory()
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

    return _start(run, held, step.running)


# Peers


def peer(system: System, mode: str) -> Trial:
    held = _reset_memory()
    captured = mode.startswith("captured")
    model = system.model.to(CUDA).train()
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, LR, (0.9, 0.98), fused=True, capturable=captured)

    def forward(*inputs: Any) -> Tensor:
        return system.loss(model(*inputs))

    def attention() -> AbstractContextManager[object]:
        cudnn = mode.endswith("cuDNN attention")
        return sdpa_kernel(CUDNN_FIRST, set_priority=True) if cudnn else nullcontext()

    compiled = torch.compile(forward, mode=MODES[mode]) if MODES[mode] else forward

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16), attention():
            loss = compiled(*system.inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()
        return loss.detach()

    advance = Replay(step) if captured else step

    def run(n: int) -> Tensor:
        torch.manual_seed(n)
        return advance().clone()

    return _start(run, held)


class Replay:
    """A step in one CUDA graph, after three that warm it up. It keeps what the graph reads."""

    def __init__(self, step: Callable[[], Tensor]):
        self.step, self.graph = step, torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss = step()

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.loss


def _start(
    step: Callable[[int], Tensor],
    held: int,
    running: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Trial:
    """Takes fifty steps; `held` is the memory that was allocated before the system was made."""
    with running():
        losses = [step(n) for n in range(50)]
        torch.cuda.synchronize()
    gigabytes = (torch.cuda.max_memory_allocated() - held) / 2**30
    numbers = itertools.count(50)
    run = Run(lambda: step(next(numbers)), running)
    return Trial(run, gigabytes, [float(loss) for loss in losses])


def _medians(trials: dict[str, Trial], rounds: int) -> dict[str, float]:
    """Seconds of a step of each, in turns."""
    return turns({name: t.run for name, t in trials.items()}, rounds=rounds, at_least=0.2)


# Subjects


def translation(sentences: int) -> tuple[Ours, Sizes, dict[str, Callable[[], System]]]:
    """Batches of the same lengths in another order, the first of which the peers get padded."""
    rng = np.random.default_rng(0)
    lengths = rng.integers((20, 19), (41, 40), (sentences, 2))  # a target gets its start, too

    def drawn() -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (rng.integers(4, VOCABULARY, source), rng.integers(4, VOCABULARY, target))
            for source, target in rng.permutation(lengths)
        ]

    batches = [text_batch(drawn(), 1, 2) for _ in range(BATCHES)]
    model = Transformer(TransformerConfig.base(VOCABULARY))

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        memory = model.encode(batch.source, batch.source_lengths)
        states = model.states(batch.target, memory, batch.target_lengths, batch.source_lengths)
        return cross_entropy(states, model.output, batch.labels, SMOOTHING), batch.tokens

    size = Sizes(sentences, (_side(batches[0].source_lengths), _side(batches[0].target_lengths)))
    peers = {
        "nn.Transformer": lambda: torch_translator(padded(batches[0])),
        "HF Marian": lambda: marian(padded(batches[0])),
    }
    return Ours(model, list(batches), loss), size, peers


def padded(batch: Batch, device: torch.device = CUDA) -> PaddedBatch:
    """The same sentences, each in a row of its own."""
    sides = {"source": batch.source_lengths.lengths, "target": batch.target_lengths.lengths}

    def rows(ids: Tensor, side: str, fill: int) -> Tensor:
        return pad_sequence(ids[0].split(sides[side].tolist()), True, fill).to(device)

    return PaddedBatch(
        rows(batch.source, "source", 0),
        rows(batch.target, "target", 0),
        rows(batch.labels, "target", -100),
        *(lengths.to(device) for lengths in sides.values()),
    )


def _side(lengths: Any) -> Side:
    return Side(lengths.total, lengths.longest)


def vision() -> tuple[Ours, Sizes, dict[str, Callable[[], System]]]:
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
    return Ours(model, batches, loss), Sizes(B, ()), peers


def language() -> tuple[Ours, Sizes, dict[str, Callable[[], System]]]:
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
    return Ours(model, list(batches), loss), size, peers


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
    trial = ours(bare, held)
    alone = tokens / _medians({"ours": trial}, options.rounds)["ours"]
    del task, bare, trial
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
    subject: tuple[Ours, Sizes, dict[str, Callable[[], System]]],
    options: argparse.Namespace,
) -> list[str]:
    """The cells of ours and of the fastest peer, which take turns once it is known."""
    task, size, peers = subject
    print(title, flush=True)
    alone: dict[tuple[str, str], float] = {}
    for name, mode in itertools.product(peers, options.modes):
        if options.peers and name not in options.peers:
            continue
        try:
            trial = start_peer(peers[name], mode)
        except (ImportError, RuntimeError) as error:
            print(f"  {name}, {mode}, is left out: {str(error).splitlines()[0]}", flush=True)
            continue
        seconds = alone[name, mode] = _medians({name: trial}, options.rounds)[name]
        print(f"  {name}, {mode}: {cell(1e3 * seconds)} ms, {trial}", flush=True)
        del trial
        _free()
    if not alone:
        return []
    name, mode = min(alone, key=alone.__getitem__)
    # The peer first: as it starts, torch's own graphs may free workspaces that ours would read.
    trials = {"peer": start_peer(peers[name], mode), "ours": ours(task, size)}
    took = _medians(trials, options.rounds)
    ran = trials["ours"], trials["peer"]
    row = cells(title, (took["ours"], took["peer"]), ran, f"{name}, {mode}")
    print(
        f"  ours: {row[1]} ms, {trials['ours']}\n  in turns with {row[5]}: {row[3]} ms, ours is "
        f"{row[6]} × as fast, with {row[7]} × the memory",
        flush=True,
    )
    return row


def start_peer(make: Callable[[], System], mode: str) -> Trial:
    torch.manual_seed(0)
    return peer(make(), mode)


HEAD = (
    *("a training step", "ours, ms", "GiB", "best peer, ms", "GiB", "the peer's settings"),
    *("× as fast", "× the memory"),
)


def cells(
    title: str, seconds: tuple[float, float], trials: tuple[Trial, Trial], settings: str
) -> list[str]:
    """A row of ours and a peer, whose ratios follow from its other cells."""
    ms, peer_ms = (cell(1e3 * value) for value in seconds)
    gib, peer_gib = (cell(trial.gigabytes) for trial in trials)
    ratios = ratio(peer_ms, ms), ratio(gib, peer_gib)
    return [title, ms, gib, peer_ms, peer_gib, settings, *ratios]


def _reset_memory() -> int:
    """The bytes that are allocated now; peaks are counted from here."""
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _free() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", default=["translation", "vision", "language"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
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
    rows = []
    if "translation" in options.subjects:
        for sentences in options.sentences:
            title = f"base Transformer, {sentences:,} sentences"
            rows.append(report(title, translation(sentences), options))
            _free()
    if "vision" in options.subjects:
        rows.append(report("ViT-B/16, 256 images", vision(), options))
        _free()
    if "language" in options.subjects:
        rows.append(report("language model", language(), options))
    if any(rows):
        print(f"\ntorch {torch.__version__}, {torch.cuda.get_device_name()}")
        print(markdown(HEAD, filter(None, rows)), flush=True)
    if "command" in options.subjects:
        for size in options.sizes:
            command(options, size)


if __name__ == "__main__":
    main()
