"""A language model of characters beside a plain Transformer, for the same time.

    python -m bench.characters train.en.xz [--megabytes 10] [--seconds 120] [--device cuda]
                               [--optimizer muon --lr 0.01]

Both learn from the first megabytes of a text but its last twentieth, in windows of 256 characters,
with as many layers, of the same width. The plain one is what one would write in an hour: learned
positions, pre-norm blocks with GELU, torch's attention, tied embeddings, AdamW, a cosine schedule
over the time, windows at random; compiled on a GPU, in bfloat16 by autocast. Ours is `regard train
language --words characters` as it stands. The last twentieth is read by both in the same windows,
each character from those before it in its window. The clock runs from the first line of each
training to its last, compiling included.
"""

import argparse
import gzip
import lzma
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.task import language
from regard.train.fit import fit

CONTEXT = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all(self.first(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Plain(nn.Module):
    def __init__(self, size: int, layers: int, width: int, heads: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(size, width), nn.Embedding(CONTEXT, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss, summed."""
        places = torch.arange(x.shape[1], device=x.device)
        states = self.norm(self.blocks(self.tokens(x) + self.places(places)))
        logits = F.linear(states, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def plain(
    train: str,
    held: str,
    seconds: float,
    device: torch.device,
    batch: int,
    lr: float,
) -> float:
    """Bits per character of the plain model."""
    known = sorted(set(train + held))
    number = {sign: n for n, sign in enumerate(known)}
    data, test = (torch.tensor([number[sign] for sign in text]) for text in (train, held))
    torch.manual_seed(0)
    shape = language.preset("tiny").model
    model = Plain(len(known) + 1, shape.layers, shape.width, shape.heads).to(device)
    step = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    rows, begun, steps = batch // CONTEXT, time.monotonic(), 0
    while (share := (time.monotonic() - begun) / seconds) < 1:
        rate = lr * min(1, (steps + 1) / 100) * max(0.02, 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(len(data) - CONTEXT, (rows,))
        windows = data[at[:, None] + torch.arange(CONTEXT)].to(device, non_blocking=True)
        with autocast:
            loss = step(*_pairs(windows, len(known))) / windows.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # or the clock would run ahead of the device
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"plain: {parameters:,} parameters, {steps} steps of {rows * CONTEXT} characters")
    return _bits(model, test, len(known), device)


def _pairs(windows: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels; each window begins with a token of its own, as ours does."""
    return torch.cat([torch.full_like(windows[:, :1], start), windows[:, :-1]], 1), windows


@torch.no_grad()
def _bits(model: Plain, test: Tensor, start: int, device: torch.device) -> float:
    whole = test[: len(test) // CONTEXT * CONTEXT].view(-1, CONTEXT).to(device)
    total = sum(float(model(*_pairs(some, start))) for some in whole.split(64))
    return total / math.log(2) / whole.numel()


def ours(
    train: str,
    held: str,
    seconds: float,
    device: torch.device,
    batch: int,
    **changes: Any,
) -> float:
    """Bits per character of `regard train language`, with changes to its training."""
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / name for name in ("train.txt", "held.txt")]
        for path, text in zip(names, (train, held)):
            path.write_text(text, "utf-8")
        preset = language.preset("tiny")
        training = replace(
            preset.training,
            minutes=seconds / 60,
            batch=batch,
            schedule="cosine",
            warmup=100,
            evaluate_every=10**9,
            save_every=10**9,
            device=str(device),
            tensorboard=False,
            **changes,
        )
        config = replace(
            preset,
            text=(str(names[0]),),
            valid=(str(names[1]),),
            judged=10**9,
            words="characters",
            context=CONTEXT,
            cache=str(Path(folder) / "cache"),
            training=training,
        )
        task = language.build(config)
        parameters = sum(parameter.numel() for parameter in task.model.parameters())
        result = fit(task, training, Path(folder) / "run")
        print(f"ours: {parameters:,} parameters, {result.step} steps of {batch} characters")
        scores = task.evaluate(task.model.eval())
    return scores["bits_per_byte"] * len(held.encode()) / len(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--batch", type=int, help="characters of a step")
    parser.add_argument("--optimizer", default="adamw", help="of ours")
    parser.add_argument("--lr", type=float, help="learning rate of ours")
    parser.add_argument("--plain-lr", type=float, default=1e-3, help="of the plain one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    batch = options.batch or (32_768 if device.type == "cuda" else 4096)
    unpacked = {".xz": lzma.open, ".gz": gzip.open}.get(options.text.suffix, open)
    with unpacked(options.text, "rb") as file:
        text = file.read(int(options.megabytes * 10**6)).decode("utf-8", "ignore")
    cut = len(text) * 19 // 20
    given = (text[:cut], text[cut:], options.seconds, device, batch)
    changes = {"optimizer": options.optimizer} | ({} if options.lr is None else {"lr": options.lr})
    found = {"plain": plain(*given, options.plain_lr), "ours": ours(*given, **changes)}
    for name, bits in found.items():
        print(f"{name:6} {bits:.4f} bits per character after {options.seconds:g} s")


if __name__ == "__main__":
    main()
