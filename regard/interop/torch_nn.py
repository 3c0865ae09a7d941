"""torch.nn's Transformer and its layers, to be read: the same blocks under other names.

    attention(nn.MultiheadAttention(12, 3))                      a MultiHeadAttention
    block(nn.TransformerEncoderLayer(12, 3))                     a Block; a decoder's reads a memory
    stack(nn.TransformerEncoder(layer, 2))                       a Stack
    stacks(nn.Transformer(12, 3))                                both Stacks
    stack(torch.load("weights.pt"), Layer(heads=3, norm="pre"))  from tensors alone

Ours take batches first, whatever `batch_first` was, and masks that say what may be attended to:
`mask=causal()`, `mask=padding(lengths)`. A state dict has no word on heads, norm, activation and
dropout; `Layer` says them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.multihead import MultiHeadAttention
from regard.interop.tensors import Pair, fill, size
from regard.model.block import Block, FeedForward, Norm, PostNorm, PreNorm
from regard.model.stack import Stack

State: TypeAlias = Mapping[str, Tensor]
Module = TypeVar("Module", bound=nn.Module)
TorchLayer: TypeAlias = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
TorchStack: TypeAlias = nn.TransformerEncoder | nn.TransformerDecoder


@dataclass(frozen=True)
class Layer:
    """What the tensors of one of torch's layers don't say."""

    heads: int
    norm: Norm = "post"
    """torch's norm_first is pre."""
    activation: Callable[[Tensor], Tensor] = F.relu
    epsilon: float = 1e-5
    dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    """torch drops attention weights and hidden units at the same rate as sublayers' outputs."""
    hidden_dropout: float | int = 0.0

    @classmethod
    def of(cls, peer: nn.Module) -> "Layer":
        """As one of torch's own layers has it."""
        own = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        if not isinstance(peer, own) or type(peer) not in own:
            raise ValueError(
                f"a {type(peer).__name__} is not one of torch's own layers, and may compute "
                "anything; read an nn.TransformerEncoderLayer or nn.TransformerDecoderLayer"
            )
        parts = dict(peer.named_children())
        rates = {name: d.p for name, d in parts.items() if isinstance(d, nn.Dropout)}
        hidden = rates.pop("dropout")
        epsilons = {name: n.eps for name, n in parts.items() if isinstance(n, nn.LayerNorm)}
        return cls(
            heads=_heads(peer),
            norm="pre" if peer.norm_first else "post",
            activation=peer.activation,
            epsilon=_one("eps", epsilons),
            dropout=_one("p", rates),
            attention_dropout=peer.self_attn.dropout,
            hidden_dropout=hidden,
        )


class Stacks(NamedTuple):
    """Both halves of an nn.Transformer, which has neither embeddings nor logits."""

    encoder: Stack
    decoder: Stack


def attention(
    peer: nn.MultiheadAttention | State, heads: int | None = None, *, dropout: float | int = 0.0
) -> MultiHeadAttention:
    """From torch's module, or from its state dict and the number of heads."""
    if isinstance(peer, nn.MultiheadAttention):
        _refuse(peer, heads)
        _check_plain(peer)
        heads, dropout = peer.num_heads, peer.dropout
    if heads is None:
        raise ValueError("a state dict does not tell its heads; attention(state, heads=8), say")
    state = _state(peer)
    bias = _biased(state)
    with torch.device("meta"):
        empty = _attention(state, "", heads, dropout, bias)
    return _filled(empty, peer, _attention_pairs(state, "", "", bias))


def block(peer: TorchLayer | State, layer: Layer | None = None) -> Block:
    """From torch's encoder or decoder layer, or from its state dict and what that doesn't say."""
    if isinstance(peer, nn.Module):
        _refuse(peer, layer)
        layer = Layer.of(peer)
    state = _state(peer)
    bias = _biased(state)
    with torch.device("meta"):
        empty = _block(state, "", _given(layer), bias)
    return _filled(empty, peer, _block_pairs(state, "", "", bias))


def stack(peer: TorchStack | State, layer: Layer | None = None) -> Stack:
    """From torch's encoder or decoder, or from its state dict and what that doesn't say."""
    layers = _layers(peer, layer) if isinstance(peer, nn.Module) else _given(layer)
    state = _state(peer)
    with torch.device("meta"):
        empty = _stack(state, "", layers, _final(peer))
    return _filled(empty, peer, _stack_pairs(state, "", ""))


def stacks(peer: nn.Transformer | State, layer: Layer | None = None) -> Stacks:
    """From torch's Transformer, or from its state dict and what that doesn't say."""
    state, pairs = _state(peer), list[Pair]()
    empty: dict[str, nn.Module] = {}
    for name in Stacks._fields:
        half = peer.get_submodule(name) if isinstance(peer, nn.Module) else None
        layers = _given(layer) if half is None else _layers(half, layer)
        with torch.device("meta"):
            empty[name] = _stack(state, f"{name}.", layers, _final(half))
        pairs += _stack_pairs(state, f"{name}.", f"{name}.")
    both = _filled(nn.ModuleDict(empty), peer, pairs)
    return Stacks(*both.values())  # type: ignore[arg-type]  # Stacks, as they went in


def _state(peer: nn.Module | State) -> State:
    return peer.state_dict() if isinstance(peer, nn.Module) else peer


def _filled(empty: Module, peer: nn.Module | State, pairs: Iterable[Pair]) -> Module:
    said = f"a {type(peer).__name__}" if isinstance(peer, nn.Module) else "the state dict"
    fill(empty, _state(peer), pairs, said)
    return empty.train(not isinstance(peer, nn.Module) or peer.training)


# What modules say


def _heads(peer: nn.Module) -> int:
    attentions = [part for part in peer.children() if isinstance(part, nn.MultiheadAttention)]
    for part in attentions:
        _check_plain(part)
    return int(_one("num_heads", {str(n): a.num_heads for n, a in enumerate(attentions)}))


def _check_plain(peer: nn.MultiheadAttention) -> None:
    if peer.add_zero_attn or peer.bias_k is not None:
        raise ValueError(
            "add_zero_attn and add_bias_kv put a key beside the source's, which ours does not have"
        )


def _layers(peer: nn.Module, layer: Layer | None) -> list[Layer]:
    _refuse(peer, layer)
    if type(peer) not in (nn.TransformerEncoder, nn.TransformerDecoder):
        raise ValueError(
            f"a {type(peer).__name__} is not one of torch's own stacks, and may compute anything; "
            "read an nn.TransformerEncoder or nn.TransformerDecoder"
        )
    return [Layer.of(part) for part in peer.get_submodule("layers").children()]


def _final(peer: nn.Module | State | None) -> float | None:
    """The last norm's epsilon, where a module tells it."""
    norm = getattr(peer, "norm", None) if isinstance(peer, nn.Module) else None
    if norm is not None and not isinstance(norm, nn.LayerNorm):
        raise ValueError(f"the last norm (a {type(norm).__name__}) must be a LayerNorm")
    return None if norm is None else norm.eps


def _one(name: str, values: Mapping[str, float | int]) -> float | int:
    if len(set(values.values())) > 1:
        raise ValueError(f"{name} must be one for all parts of a layer, not {dict(values)}")
    return next(iter(values.values()))


def _refuse(peer: nn.Module, given: object) -> None:
    if given is not None:
        raise ValueError(f"a {type(peer).__name__} says itself what it is; leave {given!r} out")


def _given(layer: Layer | None) -> Layer:
    if layer is None:
        raise ValueError("a state dict does not tell its heads; give Layer(heads=8), say")
    return layer


# Ours, empty


def _biased(state: State, under: str = "") -> bool:
    """torch leaves out all biases of a layer, or none; norms of stacks are not its layers'."""
    return any(name.startswith(under) and name.endswith("bias") for name in state)


def _attention(
    state: State, at: str, heads: int, dropout: float | int, bias: bool
) -> MultiHeadAttention:
    width = size(
        state,
        (f"{at}out_proj.weight", 0),
        (f"{at}in_proj_weight", 1),
        (f"{at}q_proj_weight", 1),
        (f"{at}out_proj.bias", 0),
    )
    keys, values = (state.get(f"{at}{name}_proj_weight") for name in ("k", "v"))
    return MultiHeadAttention(
        width,
        heads,
        source_width=None if keys is None else keys.shape[-1],
        value_source_width=None if values is None else values.shape[-1],
        bias=bias,
        dropout=dropout,
    )


def _block(state: State, at: str, layer: Layer, bias: bool) -> Block:
    width = size(state, (f"{at}norm1.weight", 0), (f"{at}self_attn.out_proj.weight", 0))
    hidden = size(state, (f"{at}linear1.weight", 0), (f"{at}linear2.weight", 1))

    def multihead(part: str) -> MultiHeadAttention:
        return _attention(state, f"{at}{part}.", layer.heads, layer.attention_dropout, bias)

    def residual() -> nn.Module:
        around = PreNorm if layer.norm == "pre" else PostNorm
        return around(width, layer.dropout, layer.epsilon)

    made = Block(
        attention=multihead("self_attn"),
        feed_forward=FeedForward(width, hidden, layer.activation, layer.hidden_dropout),
        residual=residual,
        cross=multihead("multihead_attn") if _crosses(state, at) else None,
    )
    return made if bias else _without_biases(made)


def _stack(state: State, at: str, layers: Layer | list[Layer], final: float | None) -> Stack:
    if isinstance(layers, Layer):
        layers = [layers] * _count(state, at)
    bias = _biased(state, f"{at}layers.")
    blocks = [_block(state, f"{at}layers.{n}.", layer, bias) for n, layer in enumerate(layers)]
    if not _biased(state, f"{at}norm.") and f"{at}norm.weight" not in state:
        return Stack(blocks)
    if final is None:
        final = layers[-1].epsilon if layers else 1e-5
    norm = nn.LayerNorm(size(state, (f"{at}norm.weight", 0), (f"{at}norm.bias", 0)), final)
    return Stack(blocks, norm if _biased(state, f"{at}norm.") else _without_biases(norm))


def _without_biases(module: Module) -> Module:
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.LayerNorm):
            part.register_parameter("bias", None)
    return module


def _crosses(state: State, at: str) -> bool:
    return any(name.startswith(f"{at}multihead_attn.") for name in state)


def _count(state: State, at: str) -> int:
    found = (re.match(rf"{re.escape(at)}layers\.(\d+)\.", name) for name in state)
    return max((int(match[1]) for match in found if match), default=-1) + 1


# Their names and ours


def _stack_pairs(state: State, theirs: str, ours: str) -> list[Pair]:
    bias = _biased(state, f"{theirs}layers.")
    pairs: list[Pair] = []
    for n in range(_count(state, theirs)):
        pairs += _block_pairs(state, f"{theirs}layers.{n}.", f"{ours}blocks.{n}.", bias)
    if _biased(state, f"{theirs}norm.") or f"{theirs}norm.weight" in state:
        pairs += _same(f"{theirs}norm", f"{ours}norm", _biased(state, f"{theirs}norm."))
    return pairs


def _block_pairs(state: State, theirs: str, ours: str, bias: bool) -> list[Pair]:
    pairs = _attention_pairs(state, f"{theirs}self_attn.", f"{ours}attention.", bias)
    names = [("linear1", "feed_forward.expand"), ("linear2", "feed_forward.reduce")]
    norms = ["add_attention", "add_feed_forward"]
    if _crosses(state, theirs):
        pairs += _attention_pairs(state, f"{theirs}multihead_attn.", f"{ours}cross.", bias)
        norms.insert(1, "add_cross")
    names += [(f"norm{n}", f"{norm}.norm") for n, norm in enumerate(norms, 1)]
    for their_name, our_name in names:
        pairs += _same(f"{theirs}{their_name}", f"{ours}{our_name}", bias)
    return pairs


def _attention_pairs(state: State, theirs: str, ours: str, bias: bool) -> list[Pair]:
    three = [f"{ours}{name}" for name in ("query", "key", "value")]
    pairs = _same(f"{theirs}out_proj", f"{ours}output", bias)
    if any(f"{theirs}{name}_proj_weight" in state for name in "qkv"):
        pairs += [
            Pair(f"{theirs}{name}_proj_weight", f"{our}.weight") for name, our in zip("qkv", three)
        ]
    else:
        weights = tuple(f"{our}.weight" for our in three)
        pairs.append(Pair(f"{theirs}in_proj_weight", weights, _thirds, _stacked))
    if bias:
        biases = tuple(f"{our}.bias" for our in three)
        pairs.append(Pair(f"{theirs}in_proj_bias", biases, _thirds, _stacked))
    return pairs


def _same(theirs: str, ours: str, bias: bool) -> list[Pair]:
    leaves = ("weight", "bias") if bias else ("weight",)
    return [Pair(f"{theirs}.{leaf}", f"{ours}.{leaf}") for leaf in leaves]


def _thirds(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.chunk(3)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))
