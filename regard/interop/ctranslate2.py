"""CTranslate2's models: a Transformer of text, or a language model, for its C++ engine.

    write(model, folder, …)              model.bin, config.json and the vocabularies
    ctranslate2.Translator(folder)       opens it; `Generator` a language model

Every built-in part has its place there but two: ALiBi in an encoder, and a final LayerNorm after
post-norm layers. Positions that are added become a table. Tokens are names there, not ids: the
tokenizer's files come along, and the folder's README.md has the lines to use them.

CTranslate2 writes the folder itself, by its specification of a model (`ctranslate2.specs`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.position import InputPosition
from regard.interop import cards
from regard.interop.format import Task
from regard.interop.refusal import Obstacle, other_mixing, own_parts, refuse
from regard.interop.tensors import Pair, give, new_folder, put
from regard.interop.verify import Verified, compare, reference, texts
from regard.interop.vocabulary import (
    kept,
    source_names,
    target_names,
    unknown,
)
from regard.machine.extras import install
from regard.model.embedding import Tokens
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import TextSource, Transformer, TransformerConfig

Config: TypeAlias = TransformerConfig | LanguageConfig

_QUANTIZATION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "silu": "SWISH", "swiglu": "SWISH"}
_STEPS = 13
"""Tokens that each text of the comparison is continued by."""


def write(
    model: nn.Module,
    folder: Path,
    *,
    files: Mapping[str, bytes | Path],
    task: Task | None,
    precision: str = "fp32",
) -> Verified:
    """A folder that ctranslate2.Translator, or Generator, opens, with the same logits."""
    if precision not in _QUANTIZATION:
        raise ValueError(f"precision ({precision!r}) must be one of {', '.join(_QUANTIZATION)}")
    if not isinstance(model, Transformer | LanguageModel):
        raise ValueError(
            f"CTranslate2 has no {type(model).__name__}: it writes text; export it --to onnx"
        )
    refuse("CTranslate2", _obstacles(model))
    said = _tokens(model.config, task)
    library()
    native = reference(model)
    assert isinstance(native, Transformer | LanguageModel)
    spec = _spec(native, said, files)
    spec.validate()
    spec.optimize(quantization=_QUANTIZATION[precision])
    with new_folder(folder) as draft:
        spec.save(str(draft))
        put(draft, kept(files))
        card = cards.ctranslate2(folder.name, model, said | (task or {}), files)
        (draft / "README.md").write_text(card, "utf-8")
        return _verified(native, draft, said, precision)


def library() -> Any:
    """The package, which is an extra."""
    try:
        import ctranslate2
    except ImportError:
        raise ValueError(
            f"exporting to CTranslate2 needs its package: {install('export')}"
        ) from None
    return ctranslate2


def _obstacles(model: Transformer | LanguageModel) -> list[Obstacle]:
    config = model.config
    obstacles = []
    if isinstance(config, TransformerConfig):
        if not isinstance(config.source, TextSource):
            obstacles.append(Obstacle(f"its source is text, not {config.source.kind}"))
        if config.position == "linear-bias":
            flag = "--model.position rotary"
            obstacles.append(Obstacle("its encoders have no position 'linear-bias'", flag))
    if config.norm == "post" and config.final_norm:
        text = "its stacks of norm='post' have no final_norm"
        obstacles.append(Obstacle(text, "--model.final-norm False"))
    return obstacles + other_mixing(config) + own_parts(model)


def _tokens(config: Config, task: Task | None) -> dict[str, int]:
    """The special tokens; without a task, the first ids, as our own tokenizers have them."""
    said = {name: (task or {}).get(name, n) for n, name in enumerate(("pad", "start", "end"))}
    for name, token in said.items():
        if not isinstance(token, int) or not 0 <= token < config.vocabulary:
            raise ValueError(
                f"the task's {name} ({token}) must be an id of the vocabulary (0 to "
                f"{config.vocabulary - 1}); pass task={{'start': …, 'end': …, 'pad': …}}"
            )
    return said


# The specification, and the values in it


def _spec(
    model: Transformer | LanguageModel, said: Mapping[str, int], files: Mapping[str, bytes | Path]
) -> Any:
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    names = target_names(files, config.vocabulary)
    shape: dict[str, Any] = {
        "num_heads": config.heads,
        "num_heads_kv": config.key_heads,
        "pre_norm": config.norm == "pre",
        "no_final_norm": not _final(config),
        "activation": common_spec.Activation[_ACTIVATIONS[config.activation]],
        "ffn_glu": config.activation == "swiglu",
    }
    if config.position == "rotary":
        shape |= {"rotary_dim": 0, "rotary_interleave": True}  # 0 is all of a head
    if isinstance(model, LanguageModel):
        spec = transformer_spec.TransformerDecoderModelSpec.from_config(
            num_layers=model.config.layers, alibi=config.position == "linear-bias", **shape
        )
        spec.register_vocabulary(names)
        embedded = {"decoder": model.tokens}
    else:
        source = model.config.source
        assert isinstance(source, TextSource)
        spec = transformer_spec.TransformerSpec(
            transformer_spec.TransformerEncoderSpec(model.config.encoder_layers, **shape),
            transformer_spec.TransformerDecoderSpec(model.config.decoder_layers, **shape),
        )
        spec.register_source_vocabulary(source_names(files, source.vocabulary or config.vocabulary))
        spec.register_target_vocabulary(names)
        spec.config.decoder_start_token = names[said["start"]]
        spec.config.add_source_eos = True
        assert isinstance(model.source, Tokens)
        embedded = {"encoder": model.source, "decoder": model.target}
    spec.config.bos_token, spec.config.eos_token = names[said["start"]], names[said["end"]]
    spec.config.unk_token = unknown(names, said["pad"])
    spec.config.layer_norm_epsilon = config.epsilon
    pairs = list(pairs_of(config))
    for name, tensor in give(model, pairs).items():
        _set(spec, name, tensor)
    for pair in pairs:
        for again in pair.again:  # the package stores equal tensors once
            _set(spec, again, model.state_dict()[pair.names[0]])
    for side, tokens in embedded.items():
        stack = getattr(spec, side)
        stack.scale_embeddings = tokens.scale != 1.0
        if config.position not in ("rotary", "linear-bias", "learned"):
            length = max(config.length, LONGEST)
            stack.position_encodings.encodings = _table(tokens.position, length, config.width)
    return spec


LONGEST = 1024
"""Positions that the table of an encoding without an end has at least."""


def _table(position: InputPosition | None, length: int, width: int) -> Tensor:
    if position is None:
        return torch.zeros(length, width)
    return position.encoding(torch.arange(length), torch.float32)


def _set(spec: Any, name: str, tensor: Tensor) -> None:
    from ctranslate2.specs.model_spec import index_spec

    home, _, leaf = name.rpartition("/")
    setattr(index_spec(spec, home), leaf, tensor.clone())  # quantizing is done in place


def _final(config: Config) -> bool:
    return config.norm == "pre" if config.final_norm is None else config.final_norm


def pairs_of(config: Config) -> Iterator[Pair]:
    """Their variables and ours; what is joined there lies side by side here."""
    source, target, output = (
        "encoder/embeddings_0/weight",
        "decoder/embeddings/weight",
        "decoder/projection/weight",
    )
    if isinstance(config, LanguageConfig):
        yield Pair(target, "tokens.table.weight", again=(output,) if config.share else ())
        if not config.share:
            yield Pair(output, "output.weight")
        sides = [("decoder", config.layers, "tokens")]
    else:
        match config.share:
            case "all":
                yield Pair(target, "target.table.weight", again=(source, output))
            case "target":
                yield Pair(target, "target.table.weight", again=(output,))
                yield Pair(source, "source.table.weight")
            case "none":
                yield Pair(target, "target.table.weight")
                yield Pair(source, "source.table.weight")
                yield Pair(output, "output.weight")
        if config.output_bias:
            yield Pair("decoder/projection/bias", "output.bias")
        sides = [
            ("encoder", config.encoder_layers, "source"),
            ("decoder", config.decoder_layers, "target"),
        ]
    for side, layers, embedding in sides:
        if config.position == "learned":
            yield Pair(f"{side}/position_encodings/encodings", f"{embedding}.position.table")
        if _final(config):
            yield from _norm(f"{side}/layer_norm", f"{side}.norm")
        across = side == "decoder" and isinstance(config, TransformerConfig)
        for n in range(layers):
            yield from _layer(config, f"{side}/layer_{n}", f"{side}.blocks.{n}", across)


def _layer(config: Config, theirs: str, ours: str, across: bool) -> Iterator[Pair]:
    key_heads = config.key_heads or config.heads
    head = config.width // config.heads
    heads = {"query": config.heads, "key": key_heads, "value": key_heads}
    sizes = {name: head * count for name, count in heads.items()}
    attentions: list[tuple[str, str, list[tuple[str, ...]]]] = [
        ("self_attention", "attention", [("query", "key", "value"), ("output",)])
    ]
    if across:
        attentions.append(("attention", "cross", [("query",), ("key", "value"), ("output",)]))
    for there, here, linears in attentions:
        yield from _norm(f"{theirs}/{there}/layer_norm", f"{ours}.add_{here}.norm")
        for n, parts in enumerate(linears):
            cuts = [sizes[part] for part in parts if part in sizes]
            for kind in ("weight", "bias"):
                homes = tuple(f"{ours}.{here}.{part}.{kind}" for part in parts)
                name = f"{theirs}/{there}/linear_{n}/{kind}"
                yield (
                    Pair(name, homes, _Cut(cuts), _joined) if len(homes) > 1 else Pair(name, homes)
                )
    yield from _norm(f"{theirs}/ffn/layer_norm", f"{ours}.add_feed_forward.norm")
    gated = config.activation == "swiglu"
    linear = {"linear_0": "gate", "linear_0_noact": "expand"} if gated else {"linear_0": "expand"}
    for there, here in (linear | {"linear_1": "reduce"}).items():
        for kind in ("weight",) if gated else ("weight", "bias"):
            yield Pair(f"{theirs}/ffn/{there}/{kind}", f"{ours}.feed_forward.{here}.{kind}")


def _norm(theirs: str, ours: str) -> Iterator[Pair]:
    yield Pair(f"{theirs}/gamma", f"{ours}.weight")
    yield Pair(f"{theirs}/beta", f"{ours}.bias")


class _Cut:
    """Takes a matrix apart into the rows of each part."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = list(sizes)

    def __call__(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(self.sizes)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


# The engine's own logits


def _verified(
    native: Transformer | LanguageModel, folder: Path, said: Mapping[str, int], precision: str
) -> Verified:
    """Texts are continued by the engine's own greedy search, with its cache; here the logits of all
    of its steps are computed at once."""
    ours, theirs = [], []
    sources = texts(_read_by(native), set(said.values()))
    steps = _continued(native, folder, sources, said, precision)
    with torch.no_grad():
        for source, (written, logits) in zip(sources, steps):
            if isinstance(native, Transformer):
                read = torch.tensor([[*source, said["end"]]])
                every = native(read, torch.tensor([[said["start"], *written]]))[0]
            else:
                every = native(torch.tensor([[said["start"], *source, *written]]))[0, len(source) :]
            ours.append(every[: len(logits)])
            theirs.append(logits)
    return compare(ours, theirs, "CTranslate2", exact=precision == "fp32")


def _continued(
    native: nn.Module,
    folder: Path,
    sources: Sequence[Sequence[int]],
    said: Mapping[str, int],
    precision: str,
) -> Iterator[tuple[list[int], Tensor]]:
    """What the engine writes after each text, or as its translation, with each step's logits."""
    engine = library()
    read_names, names = vocabulary(folder, "source"), vocabulary(folder, "target")
    place: dict[str, Any] = {
        "device": "cpu",
        "intra_threads": torch.get_num_threads(),
        # Where the CPU has no int8 the package takes another; half precision it would warn of.
        "compute_type": "default" if precision == "int8" else "float32",
    }
    search: dict[str, Any] = {"beam_size": 1, "return_logits_vocab": True}
    if isinstance(native, Transformer):
        read = [[read_names[i] for i in source] for source in sources]
        results = engine.Translator(str(folder), **place).translate_batch(
            read, max_decoding_length=_STEPS, min_decoding_length=0, **search
        )
        tokens = [result.hypotheses[0] for result in results]
    else:
        generator = engine.Generator(str(folder), **place)
        # One by one: in a batch, the tokens by which a prompt is longer than others count as steps.
        results = [
            generator.generate_batch(
                [[names[i] for i in (said["start"], *source)]],
                max_length=_STEPS,
                min_length=0,
                include_prompt_in_result=False,
                **search,
            )[0]
            for source in sources
        ]
        tokens = [result.sequences[0] for result in results]
    ids = {name: i for i, name in enumerate(names)}
    for written, result in zip(tokens, results):
        steps = [torch.from_numpy(np.array(step)).flatten() for step in result.logits[0]]
        yield [ids[token] for token in written], torch.stack(steps)


def _read_by(model: Transformer | LanguageModel) -> int:
    """The vocabulary size of what a model reads."""
    if isinstance(model, Transformer) and isinstance(model.config.source, TextSource):
        return model.config.source.vocabulary or model.config.vocabulary
    return model.config.vocabulary


def vocabulary(folder: Path, side: Literal["source", "target"]) -> list[str]:
    """The names of all ids, as a folder keeps them."""
    for name in (f"{side}_vocabulary.json", "shared_vocabulary.json", "vocabulary.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            names = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is not JSON ({reason}); fetch it again") from None
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ValueError(f"{path} must be a list of tokens; fetch it again")
        return names
    raise ValueError(f"{folder} has no {side}_vocabulary.json, which names its tokens; restore it")
