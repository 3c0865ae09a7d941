"""Marian's translators (OPUS-MT), as Hugging Face keeps them: the paper's Transformer, with SiLU.

    x = LayerNorm(x + Sublayer(x))       post-norm, everywhere
    r = [sin …; cos …]                   sinusoids in two halves, with the paper's frequencies
    logits = E x + b                     one table E for both languages, or one for each

Junczys-Dowmunt et al. 2018, "Marian: Fast Neural Machine Translation in C++"; Tiedemann &
Thottingal 2020, "OPUS-MT". A Regard model with sinusoids in pairs (sin, cos, sin, cos, …) goes
there too: sorting the width of every vector between the layers turns one layout into the other,
and changes no result, since no sublayer knows an order of its inputs.

Marian's decoders start from padding, the last token, whose vector is zero. A model of ours starts
from a token with a vector of its own, which always stands at position 0: written for Marian, it is
added to the decoder's first positional vector, and the vocabulary gets a padding token at its end.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from regard.attention.position import SinusoidalPositions
from regard.checkpoint import unfilled
from regard.config import from_json
from regard.interop.format import Imported, Task
from regard.interop.refusal import Obstacle, other_mixing, own_parts, refuse
from regard.interop.tensors import Pair, Tensors, fill, give, load, new_folder, settings, store
from regard.interop.transformers import verified
from regard.interop.verify import Verified, reference, texts
from regard.interop.vocabulary import NEVER, hugging_face
from regard.model.block import Activation
from regard.model.transformer import (
    Share,
    TextSource,
    Transformer,
    TransformerConfig,
    decoder_shape,
)

T = TypeVar("T")

_ACTIVATIONS: dict[str, Activation] = {
    "swish": "silu",
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
}

# What a tokenizer consists of: the two SentencePiece models, one vocabulary or two, and how to
# read them. The first three are always there; a model of ours may have a tokenizer.json instead.
_NEEDED = ("source.spm", "target.spm", "vocab.json")
_TOKENIZER = (
    *_NEEDED,
    "target_vocab.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)


@dataclass(frozen=True)
class _Architecture:
    """What their config.json says of the network, under their names and with their defaults."""

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    decoder_vocab_size: int | None = None
    max_position_embeddings: int = 1024
    activation_function: Literal["swish", "silu", "relu", "gelu"] = "gelu"
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    # Switches of another family's, which old files have; none of these networks has them on.
    normalize_before: Literal[False] = False
    normalize_embedding: Literal[False] = False
    add_final_layer_norm: Literal[False] = False


@dataclass(frozen=True)
class _Search:
    """What config.json or generation_config.json say of the tokens and of beam search."""

    decoder_start_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    num_beams: int | None = None
    max_length: int | None = None
    length_penalty: float | None = None
    renormalize_logits: bool | None = None


TASKS: tuple[str, ...] = ("translate", "dates")
SHAPE: Mapping[str, object] = {
    "norm": "post",
    "final_norm": None,
    "activation": "relu",
    "position": "sinusoidal",
    "key_heads": None,
    "window": None,
    "mixer": "attention",
    "share": "all",
    "epsilon": 1e-5,
}
"""What a model is trained with, and by which tasks, that is to be written here."""


# Reading


def read(source: Path) -> Imported:
    """The model in a folder with config.json, weights and, normally, a tokenizer."""
    said, tensors = settings(source), load(source)
    config = _config(_known(_Architecture, said, source), "final_logits_bias" in tensors, source)
    first = _check_positions(tensors, config, source)
    if config.share == "none" and "model.shared.weight" in tensors:
        # Both languages read one table, but the output has its own: here each has its own.
        shared = tensors.pop("model.shared.weight")
        for side in ("encoder", "decoder"):
            tensors.setdefault(f"model.{side}.embed_tokens.weight", shared)
    with unfilled(config, tensors, f"{source}: config.json"):
        model = Transformer(config)
    fill(model, tensors, _pairs(config), source)

    folder = source if source.is_dir() else source.parent
    files = {name: folder / name for name in _TOKENIZER if (folder / name).is_file()}
    absent = [] if "tokenizer.json" in files else [n for n in _NEEDED if n not in files]
    _check_vocabularies(files, config)
    search = _known(_Search, said | _generation(folder), source)
    task = _task(search, config)
    if first is not None:
        _start_with(model, task["start"], first, source)
    notes = []
    if absent:
        notes.append(
            f"{folder} has no {', '.join(absent)}; without a tokenizer the model cannot translate "
            "text, only token ids"
        )
    if longer := [list(words) for words in search.bad_words_ids or () if len(words) != 1]:
        notes.append(f"bad_words_ids of several tokens are left out: {longer}")
    origin = f"The Marian model {folder.resolve().name}."
    return Imported(model.eval(), files, task, origin, tuple(notes))


def _known(cls: type[T], said: Mapping[str, Any], source: Path) -> T:
    """The part of their config that concerns us; there is much more in it. A null says nothing."""
    known = get_type_hints(cls)
    part = {name: said[name] for name in known if said.get(name) is not None}
    return from_json(cls, part, f"{source}: config.json")


def _config(said: _Architecture, bias: bool, source: Path) -> TransformerConfig:
    one, target = said.share_encoder_decoder_embeddings, said.decoder_vocab_size or said.vocab_size
    equal = [
        ("encoder_attention_heads", said.encoder_attention_heads),
        ("decoder_attention_heads", said.decoder_attention_heads),
    ]
    if one:  # one table, so one vocabulary
        equal += [("vocab_size", said.vocab_size), ("decoder_vocab_size", target)]
    for (name, value), (other, its) in zip(equal[::2], equal[1::2]):
        if value != its:
            raise ValueError(
                f"{source}: {name} ({value}) and {other} ({its}) must be equal; both sides have as "
                "many heads here, and one table one vocabulary"
            )
    share: Share = "none" if not said.tie_word_embeddings else "all" if one else "target"
    return TransformerConfig(
        target,
        source=TextSource(vocabulary=None if one else said.vocab_size),
        width=said.d_model,
        heads=said.encoder_attention_heads,
        feed_forward=said.encoder_ffn_dim,
        decoder_feed_forward=(
            None if said.decoder_ffn_dim == said.encoder_ffn_dim else said.decoder_ffn_dim
        ),
        encoder_layers=said.encoder_layers,
        decoder_layers=said.decoder_layers,
        activation=_ACTIVATIONS[said.activation_function],
        norm="post",
        position="sinusoidal-halves",
        length=said.max_position_embeddings,
        share=share,
        scale=said.scale_embedding,
        output_bias=bias,
        dropout=said.dropout,
        attention_dropout=said.attention_dropout,
        hidden_dropout=said.activation_dropout,
    )


def _pairs(config: TransformerConfig) -> Iterator[Pair]:
    source, target, output = (
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    match config.share:
        case "all":
            again = (source, target, output)
            yield Pair("model.shared.weight", "target.table.weight", again=again)
        case "target":
            yield Pair(source, "source.table.weight")
            yield Pair(target, "target.table.weight", again=(output,))
        case "none":
            yield Pair(source, "source.table.weight")
            yield Pair(target, "target.table.weight")
            yield Pair(output, "output.weight")
    if config.output_bias:
        yield Pair("final_logits_bias", "output.bias", lambda b: (b[0],), lambda b: b[0][None])
    own = {"self_attn": "attention", "self_attn_layer_norm": "add_attention.norm"}
    cross = {"encoder_attn": "cross", "encoder_attn_layer_norm": "add_cross.norm"}
    last = {
        "fc1": "feed_forward.expand",
        "fc2": "feed_forward.reduce",
        "final_layer_norm": "add_feed_forward.norm",
    }
    inside = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
    sides = (
        ("encoder", config.encoder_layers, own | last),
        ("decoder", config.decoder_layers, own | cross | last),
    )
    for side, layers, parts in sides:
        for layer in range(layers):
            for theirs, ours in parts.items():
                linears = inside.items() if theirs.endswith("_attn") else [("", "")]
                for linear in linears:
                    for kind in ("weight", "bias"):
                        names = (f"model.{side}.layers.{layer}.{theirs}", linear[0], kind)
                        homes = (f"{side}.blocks.{layer}.{ours}", linear[1], kind)
                        yield Pair(".".join(filter(None, names)), ".".join(filter(None, homes)))


def _check_positions(tensors: Tensors, config: TransformerConfig, source: Path) -> Tensor | None:
    """Takes stored sinusoids out, which old files have, once they are seen to be the same.

    In a folder of ours the decoder's first one also has the vector that decoding starts with, which
    is returned.
    """
    position = SinusoidalPositions(config.width, layout="halves")
    first = None
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        table = tensors.pop(name, None)
        if table is None:
            continue
        expected = position.encoding(torch.arange(len(table)), torch.float32)
        if table.shape == expected.shape and len(table):
            rest = (table.float() - expected)[0]
            if side == "decoder" and rest.abs().max() > 1e-3:
                first, table = rest, torch.cat((expected[:1], table[1:].float()))
        if table.shape != expected.shape or not table.float().allclose(expected, 0, 1e-3):
            raise ValueError(f"{source}: {name} must be sinusoids in two halves, and is not")
    return first


def _start_with(model: Transformer, start: Any, vector: Tensor, source: Path) -> None:
    """Gives the token that decoding starts with, whose vector is zero, this one."""
    table = model.target.table.weight
    if not _token(start, len(table)) or table[start].abs().max() > 0:
        raise ValueError(
            f"{source}: the decoder's first position is no sinusoid, and its start token "
            f"({start!r}) has a vector of its own; one of both must be plain"
        )
    with torch.no_grad():
        table[start] = (vector / model.target.scale).to(table.dtype)


def _check_vocabularies(files: Mapping[str, Path], config: TransformerConfig) -> None:
    assert isinstance(config.source, TextSource)
    sizes = {
        "vocab.json": config.source.vocabulary or config.vocabulary,
        "target_vocab.json": config.vocabulary,
    }
    for name, size in sizes.items():
        if name in files:
            ids = settings(files[name], name).values()
            if not all(isinstance(number, int) and 0 <= number < size for number in ids):
                raise ValueError(
                    f"{files[name]} must give every token an id below the model's vocabulary "
                    f"({size}); it belongs to another model"
                )


def _generation(folder: Path) -> dict[str, Any]:
    """What the newer file says, which then counts."""
    name = "generation_config.json"
    said = settings(folder, name) if (folder / name).is_file() else {}
    return {name: value for name, value in said.items() if value is not None}


def _task(said: _Search, config: TransformerConfig) -> Task:
    """How these models are searched; what nobody says is as Hugging Face has it."""
    start = said.decoder_start_token_id
    return {
        "name": "translate",
        "start": said.pad_token_id if start is None else start,
        "end": said.eos_token_id,
        "pad": said.pad_token_id,
        "banned": [words[0] for words in said.bad_words_ids or () if len(words) == 1],
        "beams": said.num_beams or 1,
        "length": said.max_length or config.length,
        "length_penalty": 1.0 if said.length_penalty is None else said.length_penalty,
        "renormalize": bool(said.renormalize_logits),
    }


# Writing


def write(
    model: nn.Module,
    folder: Path,
    *,
    files: Mapping[str, bytes | Path],
    task: Task | None,
) -> Verified:
    """A folder that transformers' MarianMTModel.from_pretrained opens, with the same logits."""
    if not isinstance(model, Transformer):
        raise ValueError(f"a {type(model).__name__} is no Marian model; export a Transformer")
    _refuse(model, task)
    config, task = model.config, dict(task or {})
    tensors = give(model, _pairs(config))
    if config.position == "sinusoidal":
        tensors = {name: _sorted(name, tensor) for name, tensor in tensors.items()}
    if not config.output_bias:
        tensors["final_logits_bias"] = torch.zeros(1, config.vocabulary, dtype=_dtype(model))
    tokenizer = {name: files[name] for name in _TOKENIZER if name in files}
    vocabulary, native = config.vocabulary, task["start"]
    if config.share == "all" and native != task["pad"]:
        _start_from_padding(tensors, config, native)
        if "tokenizer.json" in files and "vocab.json" not in files:
            tokenizer = hugging_face(files["tokenizer.json"], vocabulary, task["end"])
        task |= {"start": vocabulary, "pad": vocabulary}
        task["banned"] = sorted({*task.get("banned", []), vocabulary})
        vocabulary += 1
    with new_folder(folder) as draft:
        said = _config_json(config, task, vocabulary, _dtype(model))
        store(draft, tensors, said, tokenizer)
        return _verified(model, draft, native, task["start"])


def _start_from_padding(tensors: Tensors, config: TransformerConfig, start: int) -> None:
    """Adds padding as the last token, from whose zero vector decoding starts."""
    table, bias = tensors["model.shared.weight"], tensors["final_logits_bias"]
    tensors["model.shared.weight"] = torch.cat((table, torch.zeros_like(table[:1])))
    tensors["final_logits_bias"] = torch.cat((bias, torch.full_like(bias[:, :1], NEVER)), 1)
    positions = torch.arange(config.length)
    sinusoids = SinusoidalPositions(config.width, layout="halves").encoding(
        positions, torch.float32
    )
    scale = math.sqrt(config.width) if config.scale else 1.0
    sinusoids[0] += scale * table[start].float()
    tensors["model.decoder.embed_positions.weight"] = sinusoids.to(table.dtype)


def _config_json(
    config: TransformerConfig, task: Task, vocabulary: int, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    assert isinstance(config.source, TextSource)
    said: dict[str, Any] = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": config.source.vocabulary or vocabulary,
        "decoder_vocab_size": vocabulary,
        "d_model": config.width,
        "activation_function": config.activation,
        "max_position_embeddings": config.length,
        "static_position_embeddings": True,
        "scale_embedding": config.scale,
        "share_encoder_decoder_embeddings": config.share == "all",
        "tie_word_embeddings": config.share != "none",
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.hidden_dropout,
        "dtype": str(dtype).removeprefix("torch."),
    }
    sides = {
        "encoder": (config.encoder_layers, config.feed_forward),
        "decoder": (config.decoder_layers, decoder_shape(config).feed_forward),
    }
    for side, (layers, hidden) in sides.items():
        said |= {
            f"{side}_layers": layers,
            f"{side}_attention_heads": config.heads,
            f"{side}_ffn_dim": hidden,
        }
    tokens = {
        "decoder_start_token_id": task["start"],
        "eos_token_id": task["end"],
        "forced_eos_token_id": task["end"],
        "pad_token_id": task["pad"],
        "bos_token_id": None,
    }
    generation = tokens | {
        "bad_words_ids": [[token] for token in task.get("banned", [])] or None,
        "num_beams": task.get("beams", 1),
        "max_length": task.get("length", config.length),
        "length_penalty": task.get("length_penalty", 1.0),
        "renormalize_logits": task.get("renormalize", False),
    }
    return {"config.json": said | tokens, "generation_config.json": generation}


def _verified(model: Transformer, folder: Path, native: int, start: int) -> Verified:
    """Of all tokens that the model itself has; each begins with its own start."""
    config = model.config
    assert isinstance(config.source, TextSource)
    sources, targets = (
        texts(config.source.vocabulary or config.vocabulary),
        texts(config.vocabulary),
    )
    pairs = [(torch.tensor([s]), t) for s, t in zip(sources, reversed(targets))]
    begun = {first: [torch.tensor([[first, *t]]) for _, t in pairs] for first in (native, start)}

    def logits(one: Any, first: int) -> list[Tensor]:
        return [one(s, t)[0, :, : config.vocabulary] for (s, _), t in zip(pairs, begun[first])]

    def theirs(peer: Any) -> list[Tensor]:
        return logits(lambda s, t: peer(s, decoder_input_ids=t).logits, start)

    return verified(
        model,
        folder,
        "MarianMTModel",
        lambda ours: logits(ours, native),
        theirs,
        lambda place: logits(reference(read(place).model), start),
    )


def _refuse(model: Transformer, task: Task | None) -> None:
    """All that Marian has no place for, at once."""
    config = model.config
    obstacles = []
    if not isinstance(config.source, TextSource):
        obstacles.append(Obstacle(f"its source is text, not {config.source.kind}"))
    if config.norm != "post" or config.final_norm:
        text = "its norms come after each residual sum (norm='post', final_norm=False)"
        flag = "--model.norm post" + (" --model.final-norm None" if config.final_norm else "")
        obstacles.append(Obstacle(text, flag))
    if config.activation not in _ACTIVATIONS.values():
        text = f"its feed-forward networks have no {config.activation}"
        obstacles.append(Obstacle(text, "--model.activation relu"))
    if config.position not in ("sinusoidal", "sinusoidal-halves"):
        text = f"its positions are sinusoids, not {config.position}"
        obstacles.append(Obstacle(text, "--model.position sinusoidal"))
    if config.key_heads not in (None, config.heads):
        text = f"it has as many key heads ({config.key_heads}) as heads ({config.heads})"
        obstacles.append(Obstacle(text, "--model.key-heads None"))
    if config.epsilon != 1e-5:
        text = f"its LayerNorms have epsilon 1e-5, not {config.epsilon}"
        obstacles.append(Obstacle(text, "--model.epsilon 1e-5"))
    refuse("Marian", [*obstacles, *other_mixing(config), *own_parts(model)], "--for marian")
    tokens = {name: (task or {}).get(name) for name in ("start", "end", "pad")}
    assert isinstance(config.source, TextSource)
    table = min(config.vocabulary, config.source.vocabulary or config.vocabulary)
    wrong = [f"{name} ({token})" for name, token in tokens.items() if not _token(token, table)]
    if wrong:
        raise ValueError(
            f"Marian's config names tokens of both vocabularies (0 to {table - 1}), but the task "
            f"has {', '.join(wrong)}; pass task={{'start': …, 'end': …, 'pad': …}}"
        )


def _token(token: object, vocabulary: int) -> bool:
    return isinstance(token, int) and 0 <= token < vocabulary


def _sorted(name: str, tensor: Tensor) -> Tensor:
    """The axis that is a vector between the layers: even places, the sines', first."""
    kind = name.rpartition(".")[2]
    if name == "final_logits_bias":
        return tensor
    if any(part in name for part in ("q_proj", "k_proj", "v_proj", "fc1")):
        axis = None if kind == "bias" else 1  # they read such vectors
    elif "embed_tokens" in name or "shared" in name or "lm_head" in name:
        axis = 1
    else:  # out_proj, fc2 and norms write them
        axis = 0
    if axis is None:
        return tensor
    order = torch.arange(tensor.shape[axis])
    return tensor.index_select(axis, torch.cat((order[::2], order[1::2])))


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
