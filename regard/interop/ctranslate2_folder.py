"""CTranslate2's folders, to be read: of its own converters, or written by `ctranslate2.py`.

Sizes and switches are variables of model.bin, beside the weights. A variable that none of our parts
has is named, and the folder refused. Weights of 8 or 16 bits become float32.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from regard.attention.position import SinusoidalPositions
from regard.checkpoint import unfilled
from regard.config import from_json
from regard.interop import model_bin
from regard.interop.ctranslate2 import LONGEST, Config, pairs_of, vocabulary
from regard.interop.format import Imported, Task
from regard.interop.tensors import Tensors, fill, settings
from regard.interop.vocabulary import NEVER, TOKENIZERS
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import TextSource, Transformer, TransformerConfig


@dataclass(frozen=True)
class _Settings:
    """What config.json says that concerns us, with the package's defaults."""

    bos_token: str = "<s>"
    eos_token: str = "</s>"
    unk_token: str = "<unk>"
    decoder_start_token: str = "<s>"
    layer_norm_epsilon: float = 1e-5


def read(source: Path) -> Imported:
    """A folder with model.bin, config.json and vocabularies; a tokenizer where it has one."""
    folder = source if source.is_dir() else source.parent
    stored = model_bin.read(folder / "model.bin")
    tensors = model_bin.dequantized(stored.variables)
    every, names = settings(folder), vocabulary(folder, "target")
    known = {key: every[key] for key in get_type_hints(_Settings) if every.get(key) is not None}
    said = from_json(_Settings, known, str(folder / "config.json"))
    zero = _switch(tensors, "decoder/start_from_zero_embedding")
    if zero:
        names = _with_padding(tensors, names)
    config = _config(stored.specification, tensors, said, folder)
    pairs = list(pairs_of(config))
    kind = Transformer if isinstance(config, TransformerConfig) else LanguageModel
    with unfilled(config, tensors, f"{folder}: model.bin"):
        model: Any = kind(config)  # type: ignore[arg-type]
    fill(model, tensors, pairs, folder / "model.bin")
    files = {name: folder / name for name in TOKENIZERS if (folder / name).is_file()}
    notes = []
    if not files:
        notes.append(
            f"{folder} has no tokenizer; without one the model reads and writes token ids alone"
        )
    task = _task(said, names, config, zero, folder)
    origin = f"The CTranslate2 model {folder.resolve().name}."
    return Imported(model.eval(), files, task, origin, tuple(notes))


def _switch(tensors: Tensors, name: str, otherwise: int = 0) -> int:
    """Takes a number out."""
    value = tensors.pop(name, None)
    if value is None:
        return otherwise
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, not {value.numel()}; it is damaged")
    return int(value)


def _with_padding(tensors: Tensors, names: list[str]) -> list[str]:
    """A decoder that starts from zero: from a padding token, at the end of both vocabularies."""
    done: dict[int, Tensor] = {}
    for name in ("encoder/embeddings_0/weight", *_TABLES):
        table = tensors.get(name)
        if table is not None:
            padded = torch.cat((table, torch.zeros_like(table[:1])))
            tensors[name] = done.setdefault(id(table), padded)
    bias = tensors.get("decoder/projection/bias")
    bias = torch.zeros(len(names)) if bias is None else bias
    tensors["decoder/projection/bias"] = torch.cat((bias, torch.full((1,), NEVER)))
    return [*names, "<pad>"]


_TABLES = ("decoder/embeddings/weight", "decoder/projection/weight")


def _config(specification: str, tensors: Tensors, said: _Settings, folder: Path) -> Config:
    """The config that the variables tell; what they say of anything else is refused."""
    sides = {"TransformerSpec": ("encoder", "decoder"), "TransformerDecoderSpec": ("decoder",)}
    if specification not in sides:
        known = ", ".join(sides)
        raise ValueError(f"{folder} holds a {specification}; known are {known}")
    shapes = [_side(tensors, side, said, folder) for side in sides[specification]]
    first = shapes[0]
    layers = [shape.pop("layers") for shape in shapes]
    hidden = [shape.pop("feed_forward") for shape in shapes]
    if any(shape != first for shape in shapes):
        unlike = [name for name in first if any(shape[name] != first[name] for shape in shapes)]
        raise ValueError(f"{folder}: encoder and decoder differ in {', '.join(unlike)}")
    scale, target = first.pop("scale"), _rows(tensors, "decoder/embeddings/weight", folder)
    same = _same_table(tensors, *_TABLES)
    if len(shapes) == 1:
        if scale:
            raise ValueError(f"{folder}: a language model that scales its embeddings is not known")
        return LanguageConfig(target, share=same, layers=layers[0], feed_forward=hidden[0], **first)
    source = _rows(tensors, "encoder/embeddings_0/weight", folder)
    joint = _same_table(tensors, "encoder/embeddings_0/weight", _TABLES[0])
    return TransformerConfig(
        target,
        source=TextSource(vocabulary=None if source == target else source),
        share="all" if same and joint else "target" if same else "none",
        scale=bool(scale),
        output_bias="decoder/projection/bias" in tensors,
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        feed_forward=hidden[0],
        decoder_feed_forward=None if hidden[0] == hidden[1] else hidden[1],
        **first,
    )


def _rows(tensors: Tensors, name: str, folder: Path) -> int:
    if name not in tensors or tensors[name].ndim != 2:
        raise ValueError(f"{folder}: model.bin has no matrix {name}; it is damaged")
    return len(tensors[name])


def _same_table(tensors: Tensors, one: str, two: str) -> bool:
    return one in tensors and two in tensors and torch.equal(tensors[one], tensors[two])


def _side(tensors: Tensors, side: str, said: _Settings, folder: Path) -> dict[str, Any]:
    """The shape of a stack. Switches that our models have no part for must be off."""
    for name, usual in (
        *((name, 0) for name in ("alibi_use_positive_positions", "scale_alibi")),
        *((name, None) for name in ("embeddings_merge", "alignment_layer", "alignment_heads")),
        ("multi_query_attention", None),
    ):
        value = _switch(tensors, f"{side}/{name}", usual or 0)
        if usual is not None and value != usual:
            raise ValueError(
                f"{folder}: {side}/{name} ({value}) is not known here; it must be {usual}"
            )
    layers = 1 + max(
        (int(n) for n in re.findall(rf"{side}/layer_(\d+)/", " ".join(tensors))), default=-1
    )
    inside = f"{side}/layer_0/self_attention"
    rotary = {
        name: {
            _switch(tensors, f"{side}/layer_{n}/self_attention/{name}", otherwise)
            for n in range(layers)
        }
        for name, otherwise in (
            ("rotary_dim", -1),
            ("rotary_interleave", 1),
            ("rotary_base", 10000),
        )
    }
    key_heads = {
        _switch(tensors, f"{side}/layer_{n}/{part}/num_heads_kv", 0)
        for n in range(layers)
        for part in ("self_attention", "attention")
        if part == "self_attention" or f"{side}/layer_{n}/attention/linear_0/weight" in tensors
    }
    heads = _switch(tensors, f"{side}/num_heads", 8)
    width = (
        tensors[f"{inside}/layer_norm/gamma"].numel()
        if f"{inside}/layer_norm/gamma" in tensors
        else 0
    )
    if not width or heads < 1:
        raise ValueError(f"{folder}: {inside} has no LayerNorm of its own, which is not known here")
    position, length = _position(tensors, side, rotary, width, heads, folder)
    gated = f"{side}/layer_0/ffn/linear_0_noact/weight" in tensors
    number = _switch(tensors, f"{side}/activation")
    activation = {0: "relu", 2: "swiglu" if gated else "silu", 3: "gelu"}.get(number)
    if activation is None or (gated and activation != "swiglu"):
        raise ValueError(f"{folder}: activation {number}{' gated' * gated} is not known here")
    pre = bool(_switch(tensors, f"{side}/pre_norm", 1))
    final = f"{side}/layer_norm/gamma" in tensors
    hidden = tensors.get(f"{side}/layer_0/ffn/linear_1/weight", torch.empty(0, 0)).shape[-1]
    return {
        "layers": layers,
        "feed_forward": hidden,
        "width": width,
        "heads": heads,
        "key_heads": max(key_heads) or None,
        "activation": activation,
        "norm": "pre" if pre else "post",
        "final_norm": None if final == pre else final,
        "position": position,
        "length": length,
        "scale": _switch(tensors, f"{side}/scale_embeddings", 1),
        "epsilon": said.layer_norm_epsilon,
    }


def _position(
    tensors: Tensors,
    side: str,
    rotary: Mapping[str, set[int]],
    width: int,
    heads: int,
    folder: Path,
) -> tuple[str, int]:
    """The position's name, and how many there are."""
    alibi = _switch(tensors, f"{side}/alibi")
    if rotary["rotary_dim"] != {-1}:
        usual = {"rotary_interleave": {1}, "rotary_base": {10000}}
        if rotary["rotary_dim"] - {0, width // heads} or any(
            rotary[n] != v for n, v in usual.items()
        ):
            raise ValueError(
                f"{folder}: rotary positions of another kind than ours: {dict(rotary)}"
            )
        return "rotary", LONGEST
    if alibi:
        return "linear-bias", LONGEST
    name = f"{side}/position_encodings/encodings"
    table = tensors.get(name)
    if table is None:
        raise ValueError(
            f"{folder} has no {name}: sinusoids of CTranslate2's own are not known here"
        )
    rows = torch.arange(len(table))
    known = {
        "sinusoidal": SinusoidalPositions(width),
        "sinusoidal-halves": SinusoidalPositions(width, layout="halves"),
    }
    for kind, position in known.items():
        expected = position.encoding(rows, torch.float32)
        if table.shape == expected.shape and table.float().allclose(expected, 0, 1e-3):
            del tensors[name]
            return kind, len(table)
    if not table.any():
        del tensors[name]
        return "none", len(table)
    return "learned", len(table)


def _task(said: _Settings, names: list[str], config: Config, zero: int, folder: Path) -> Task:
    """Token names become ids; what nobody says is as CTranslate2 has it."""
    ids = {name: i for i, name in enumerate(names)}
    language = isinstance(config, LanguageConfig)
    first = said.bos_token if language else "<pad>" if zero else said.decoder_start_token
    for name in (first, said.eos_token):
        if name not in ids:
            raise ValueError(f"{folder}: {name!r} is not in the vocabulary; restore config.json")
    start, end = ids[first], ids[said.eos_token]
    pad = ids.get("<pad>", start)
    never = {pad, start, ids.get(said.unk_token, start)} - {end}
    return {
        "name": "language" if language else "translate",
        "start": start,
        "end": end,
        "pad": pad,
        "banned": sorted(never),
        "beams": 2,
        "length": min(config.length, 250),
        "length_penalty": 1.0,
    }
