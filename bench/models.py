"""Our models beside their peers: the same shapes, dtype and batch, eager and compiled.

    translation   the base Transformer (6 + 6 layers, width 512, 16,000 tokens) on sentences of 20
                  to 40 tokens, against nn.Transformer and HF Marian. Ours gets the batch packed,
                  as it is meant to be used; the peers get it padded, as they must. Speeds count
                  real tokens, source and target.
    vision        ViT-B/16 at 224 pixels against timm, HF ViT and torchvision.

`train` is a whole step: forward, loss with label smoothing, backward, and on CUDA Adam's fused
update, in mixed precision where the dtype is half: float32 weights under autocast, as everybody
trains. `infer` is the forward pass alone, in evaluation mode, with weights in that dtype. Ratios
are those of the speeds as shown: above 1, ours is faster.
"""

import argparse
import gc
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.table import cell, ratio
from bench.timing import Run, turns
from regard.attention.mask import PackedLengths, causal, padding
from regard.attention.position import SinusoidalPositions
from regard.model.transformer import Transformer, TransformerConfig
from regard.model.vit import VisionTransformer
from regard.train.loss import cross_entropy

VOCABULARY, SMOOTHING = 16_000, 0.1


@dataclass
class Batch:
    """Sentences in both forms, and how many real tokens they hold."""

    source: Tensor
    target: Tensor
    labels: Tensor
    source_lengths: Tensor
    target_lengths: Tensor

    @classmethod
    def draw(cls, sentences: int, device: str) -> "Batch":
        lengths = torch.randint(20, 41, (2, sentences), device="cpu")
        S, T = (int(n.max()) for n in lengths)
        source, target = (torch.randint(4, VOCABULARY, (sentences, n)) for n in (S, T + 1))
        labels = target[:, 1:].clone()
        labels[torch.arange(T) >= lengths[1, :, None]] = -100
        move = (source, target[:, :-1], labels, lengths[0], lengths[1])
        return cls(*(t.to(device) for t in move))

    @property
    def tokens(self) -> int:
        return int(self.source_lengths.sum() + self.target_lengths.sum())

    def visible(self, side: str) -> Tensor:
        """True at real tokens, (B, S)."""
        ids, lengths = getattr(self, side), getattr(self, f"{side}_lengths")
        return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]

    def packed(self) -> tuple[Tensor, Tensor, Tensor, PackedLengths, PackedLengths]:
        source, target = (getattr(self, n)[self.visible(n)][None] for n in ("source", "target"))
        labels = self.labels[self.visible("target")][None]
        device = str(source.device)
        lengths = [
            PackedLengths(n.cpu(), device) for n in (self.source_lengths, self.target_lengths)
        ]
        return source, target, labels, lengths[0], lengths[1]


@dataclass
class System:
    """A model, its inputs, and what a training step does with its result."""

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor] = lambda result: result


def smoothed(labels: Tensor) -> Callable[[Tensor], Tensor]:
    """The usual loss, over all logits at once."""
    return lambda logits: F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), label_smoothing=SMOOTHING
    )


# Translation


class Ours(nn.Module):
    """The Transformer's last vectors, which become a loss in pieces, or logits."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor, S: PackedLengths, T: PackedLengths) -> Tensor:
        return self.model.states(target, self.model.encode(source, S), T, S)


def our_translator(batch: Batch) -> System:
    source, target, labels, S, T = batch.packed()
    model = Transformer(TransformerConfig.base(VOCABULARY))
    count = labels.numel()
    return System(
        Ours(model),
        (source, target, S, T),
        lambda states: cross_entropy(states, model.output, labels, SMOOTHING) / count,
        model.output,
    )


class TorchTransformer(nn.Module):
    """nn.Transformer with what it leaves to its user: embeddings, positions, masks, output."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = 512,
        heads: int = 8,
        layers: int = 6,
        feed_forward: int = 2048,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(
            width, heads, layers, layers, feed_forward, 0.1, batch_first=True
        )
        self.register_buffer("positions", SinusoidalPositions(width).encoding(torch.arange(512)))
        self.dropout = nn.Dropout(0.1)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * math.sqrt(self.table.embedding_dim) + self.positions[: ids.shape[1]]
        return self.dropout(x)

    def forward(self, source: Tensor, target: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        states = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )
        return F.linear(states, self.table.weight)


def torch_translator(batch: Batch) -> System:
    T = batch.target.shape[1]
    future = torch.ones(T, T, dtype=torch.bool, device=batch.target.device).triu(1)
    inputs = (batch.source, batch.target, ~batch.visible("source"), future)
    return System(TorchTransformer(), inputs, smoothed(batch.labels))


class Logits(nn.Module):
    """A Hugging Face model as a function of tensors that returns logits."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, inputs))).logits


def marian_model(
    vocabulary: int = VOCABULARY,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    feed_forward: int = 2048,
) -> nn.Module:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=feed_forward,
        decoder_ffn_dim=feed_forward,
        activation_function="relu",
        dropout=0.1,
        pad_token_id=0,
        scale_embedding=True,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return Logits(MarianMTModel(config), ("input_ids", "attention_mask", "decoder_input_ids"))


def marian(batch: Batch) -> System:
    inputs = (batch.source, batch.visible("source").long(), batch.target)
    return System(marian_model(), inputs, smoothed(batch.labels))


# Vision


def our_vit(images: Tensor, labels: Tensor) -> System:
    return System(VisionTransformer.base(1000), (images,), smoothed(labels))


def hf_vit(images: Tensor, labels: Tensor) -> System:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=1000))
    return System(Logits(model, ("pixel_values",)), (images,), smoothed(labels))


def timm_vit(images: Tensor, labels: Tensor) -> System:
    import timm

    return System(timm.create_model("vit_base_patch16_224"), (images,), smoothed(labels))


def torchvision_vit(images: Tensor, labels: Tensor) -> System:
    import torchvision

    return System(torchvision.models.vit_b_16(), (images,), smoothed(labels))


TRANSLATORS = {"ours": our_translator, "nn.Transformer": torch_translator, "HF Marian": marian}
VITS = {"ours": our_vit, "timm": timm_vit, "HF ViT": hf_vit, "torchvision": torchvision_vit}


# The same weights give the same logits


def agreement(device: str, wanted: list[str] | None = None) -> None:
    """Peers' weights read by the importers: the largest difference beside the largest logit."""
    torch.manual_seed(0)
    batch = Batch.draw(3, device)
    images = torch.randn(2, 3, 224, 224, device=device)
    labels = torch.zeros(2, dtype=torch.long, device=device)
    checks: dict[str, Callable[[], Tensor]] = {
        "nn.Transformer": lambda: _against_torch(batch),
        "HF Marian": lambda: _against_folder(marian(batch), batch),
        "HF ViT": lambda: _against_folder(hf_vit(images, labels), None),
        "timm": lambda: _against_timm(timm_vit(images, labels)),
    }
    for name, check in checks.items():
        if wanted and name not in wanted:
            continue
        try:
            with torch.no_grad():
                print(f"  {name}: logits differ by {check():.1e} of the largest", flush=True)
        except ImportError as error:
            print(f"  {name} is left out: {error}")


def _against_torch(batch: Batch) -> Tensor:
    from regard.interop.torch_nn import stacks

    system = torch_translator(batch)
    peer = system.model.to(batch.source.device).eval()
    encoder, decoder = (part.eval() for part in stacks(peer.body))
    hidden = padding(batch.source_lengths)
    memory = encoder(peer.embed(batch.source), mask=hidden)
    states = decoder(peer.embed(batch.target), memory, mask=causal(), memory_mask=hidden)
    ours = F.linear(states, peer.table.weight)
    return _apart(ours, peer(*system.inputs))


def _against_folder(system: System, batch: Batch | None) -> Tensor:
    """Hugging Face's own folder, read here; their real positions are compared."""
    from regard.interop import read

    device = system.inputs[0].device
    peer = system.model.to(device).eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.model.save_pretrained(folder)
        model = read(folder).model.to(device).eval()
    theirs = peer(*system.inputs)
    if batch is None:
        return _apart(model(system.inputs[0]), theirs)
    ours = model(batch.source, batch.target, source_lengths=batch.source_lengths)
    real = batch.visible("target")
    return _apart(ours[real], theirs[real])


def _against_timm(system: System) -> Tensor:
    from regard.interop.timm import from_timm

    peer = system.model.to(system.inputs[0].device).eval()
    nn.init.normal_(peer.head.weight)  # timm's starts at zero
    ours = from_timm(peer.state_dict(), heads=12).to(system.inputs[0].device).eval()
    return _apart(ours(*system.inputs), peer(*system.inputs))


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours - theirs).abs().max() / theirs.abs().max()


# Measuring


def gather(makers: dict[str, Callable[..., System]], *data: Any) -> dict[str, System]:
    """The systems that this machine has."""
    found = {}
    for name, make in makers.items():
        try:
            torch.manual_seed(0)
            found[name] = make(*data)
        except ImportError as error:
            print(f"  {name} is left out: {error}")
    return found


def training(system: System, compiled: bool, dtype: torch.dtype) -> Run:
    system.model.float()
    model = torch.compile(system.model) if compiled else system.model
    parameters = list(system.model.parameters())
    device = parameters[0].device.type
    adam = torch.optim.AdamW(parameters, fused=True) if device == "cuda" else None
    mixed = dtype is not torch.float32

    def step() -> Tensor:
        system.model.train()
        with torch.autocast(device, dtype if mixed else None, enabled=mixed):
            loss = system.loss(model(*system.inputs))
        loss.backward()
        if adam is not None:
            adam.step()
        for parameter in parameters:
            parameter.grad = None
        return loss

    return Run(step)


def inference(system: System, compiled: bool, dtype: torch.dtype) -> Run:
    system.model.to(dtype)
    model = torch.compile(system.model) if compiled else system.model

    def call() -> Tensor:
        system.model.eval()
        return system.logits(model(*system.inputs))

    return Run(call, torch.no_grad)


def peak(run: Run) -> float:
    """GiB at the height of a step, once everything is compiled and Adam has its moments."""
    for _ in range(3):
        run.call()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run.call()
    return torch.cuda.max_memory_allocated() / 2**30


def report(
    title: str,
    makers: dict[str, Callable[..., System]],
    data: tuple[Any, ...],
    items: int,
    options: argparse.Namespace,
) -> None:
    """Ratios to ours, for training and inference, eager and compiled."""
    print(title, flush=True)
    wanted = options.peers
    makers = {
        name: make
        for name, make in makers.items()
        if name == "ours" or not wanted or name in wanted
    }
    systems = gather(makers, *data)
    for system in systems.values():
        system.model.to(options.device)
    for kind in options.kinds:
        make = training if kind == "train" else inference
        runs = {
            f"{name} {way}": make(system, way == "compiled", getattr(torch, options.dtype))
            for name, system in systems.items()
            for way in options.ways
        }
        # Long enough for the host to run ahead of a device, as it does over many batches.
        took = turns(runs, rounds=options.rounds, at_least=0.2)
        for way in options.ways:
            speeds = {name: cell(items / took[f"{name} {way}"]) for name in systems}
            ratios = ", ".join(
                f"{name} {speed}/s, {ratio(speeds['ours'], speed)} ×"
                for name, speed in speeds.items()
                if name != "ours"
            )
            print(f"  {kind} {way}: ours {speeds['ours']}/s; {ratios}", flush=True)
        fastest = min(took[name] for name in took if name.startswith("ours"))
        best = min((took[name], name) for name in took if not name.startswith("ours"))
        mine, theirs = cell(items / fastest), cell(items / best[0])
        print(
            f"  {kind}, the best of each: ours {mine}/s, {best[1]} {theirs}/s, "
            f"{ratio(mine, theirs)} ×",
            flush=True,
        )


def memory(sentences: int, options: argparse.Namespace) -> None:
    print(f"Peak memory of a training step, {sentences} sentences, GiB:")
    for name, make in TRANSLATORS.items():
        for way in options.ways:
            torch._dynamo.reset()
            try:
                system = make(Batch.draw(sentences, options.device))
            except ImportError:
                continue
            system.model.to(options.device)
            run = training(system, way == "compiled", getattr(torch, options.dtype))
            print(f"  {name} {way}: {peak(run):.2f}", flush=True)
            del system
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--sentences", type=int, nargs="*", default=[256, 1024] if cuda else [16])
    parser.add_argument("--images", type=int, nargs="*", default=[256] if cuda else [4])
    parser.add_argument("--ways", nargs="*", default=["eager", "compiled"])
    parser.add_argument("--kinds", nargs="*", default=["train", "infer"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", nargs="+", help="these alone, such as timm")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("highest")
    print("The same weights, read by the importers:")
    agreement(options.device, options.peers)
    for sentences in options.sentences:
        torch.manual_seed(0)
        batch = Batch.draw(sentences, options.device)
        title = f"Base Transformer, {sentences} sentences, {batch.tokens} real tokens"
        report(title, TRANSLATORS, (batch,), batch.tokens, options)
    for count in options.images:
        dtype = getattr(torch, options.dtype)
        images = torch.randn(count, 3, 224, 224, device=options.device, dtype=dtype)
        labels = torch.randint(1000, (count,), device=options.device)
        report(f"ViT-B/16, {count} images", VITS, (images, labels), count, options)
    if options.device == "cuda" and options.sentences:
        memory(max(options.sentences), options)


if __name__ == "__main__":
    main()
