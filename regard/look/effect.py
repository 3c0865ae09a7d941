"""The effect of attention on the output: a model answers again with a part of it changed.

    with changed(model, off=[("decoder.blocks.1.cross", 2)], hidden=[3, 4]):
        translator.translate([text])

A weight shows where a head looked, not whether it mattered (Jain and Wallace 2019). An effect is
the fall of log p

    with a head off         its output is 0
    with a word hidden      no query may attend to the word's tokens, in any layer
    with another β          β of a head times a factor: 0 averages all keys, large picks the best

Changes apply to calls from the thread that entered the block, and other threads get the answers of
the unchanged model. In this thread decoding runs the model's own modules, whatever its engine.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.attention.core import Inputs, Observer, check_core, observe
from regard.attention.mask import Mask
from regard.attention.multihead import MultiHeadAttention
from regard.model.transformer import Transformer

HeadName: TypeAlias = tuple[str, int]
"""The name of an attention in its model, and the number of one of its heads."""


@contextmanager
def changed(
    model: nn.Module,
    *,
    off: Iterable[HeadName] = (),
    beta: Mapping[HeadName, float | int] | None = None,
    hidden: Sequence[int] | Bool[Tensor, "B S"] = (),
) -> Iterator[None]:
    """Heads switched off, β multiplied, and source positions hidden, while the block runs.

    `hidden` are positions of the source, or True at those of each row of a batch. Encoders and
    cross-attention obey; the tokens of a decoder that has a source stay visible. A language model's
    source is its own text.
    """
    attentions = attentions_of(model)
    alone = not any(name.endswith(".cross") for name in attentions)
    factors = dict(beta or {})
    for name, head in (*off, *factors):
        check_head(attentions, name, head)
    with ExitStack() as stack:
        for name, module in attentions.items():
            silent = [head for of, head in off if of == name]
            sharper = {head: factor for (of, head), factor in factors.items() if of == name}
            hides = len(hidden) > 0 and (alone or reads_source(name))
            if not (silent or sharper or hides):
                continue
            check_core(module.core, name, weights=False)
            observers = []
            if sharper:
                if module.core.score is not None:
                    raise ValueError(f"{name} has a score of its own, and no β; leave it as it is")
                observers.append(Observer(change=_sharpen(sharper, module.heads)))
            if hides:
                observers.append(Observer(change=_hide(hidden)))
            if silent:
                observers.append(Observer(change_output=_silence(silent)))
            for observer in observers:
                stack.enter_context(observe({module.core: observer}))
        yield


def reads_source(name: str) -> bool:
    """True if an attention's keys are the source's: all but a decoder's own."""
    return not (name.startswith("decoder.") and name.endswith(".attention"))


def attentions_of(model: nn.Module) -> dict[str, MultiHeadAttention]:
    """A model's attentions, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    }


def check_head(attentions: Mapping[str, MultiHeadAttention], name: str, head: int) -> None:
    """Refuses a head that is not there."""
    if name not in attentions:
        raise ValueError(f"attention ({name!r}) is unknown; there are {', '.join(attentions)}")
    heads = attentions[name].heads
    if not 0 <= head < heads:
        raise ValueError(f"head ({head}) of {name} must lie from 0 to {heads - 1}")


def _sharpen(factors: Mapping[int, float | int], heads: int) -> Callable[[Inputs], Inputs]:
    def sharpen(inputs: Inputs) -> Inputs:
        query = inputs.query
        scale = torch.ones(heads, dtype=query.dtype, device=query.device)
        for head, factor in factors.items():
            scale[head] = factor
        return inputs._replace(query=query * scale[:, None, None])

    return sharpen


def _hide(hidden: Sequence[int] | Tensor) -> Callable[[Inputs], Inputs]:
    def hide(inputs: Inputs) -> Inputs:
        key = inputs.key
        if isinstance(hidden, Tensor):
            visible = ~hidden.to(key.device)[:, None, None]
        else:
            visible = torch.ones(1, 1, 1, key.shape[-2], dtype=torch.bool, device=key.device)
            visible[..., [place for place in hidden if place < key.shape[-2]]] = False
        mask = Mask.from_tensor(visible)
        return inputs._replace(mask=mask if inputs.mask is None else inputs.mask & mask)

    return hide


def _silence(heads: Sequence[int]) -> Callable[[Tensor], Tensor]:
    def silence(output: Tensor) -> Tensor:
        output = output.clone()
        output[..., list(heads), :, :] = 0
        return output

    return silence


# Effects on the output of a Transformer


@torch.inference_mode()
def log_p(
    model: Transformer, source: Tensor, target: Sequence[int], start: int, end: int
) -> Float[Tensor, "B L"]:
    """log p of each token of a target, and of EOS, for each row of a batch of sources."""
    device = source.device
    tokens = torch.tensor([*target, end], device=device)
    inputs = torch.tensor([[start, *target]], device=device).expand(len(source), -1)
    logs = model(source, inputs).float().log_softmax(-1)
    return logs[:, torch.arange(len(tokens), device=device), tokens].cpu()


@torch.inference_mode()
def effect_of_units(
    model: Transformer,
    source: Tensor,
    target: Sequence[int],
    units: Sequence[Sequence[int]],
    start: int,
    end: int,
) -> Float[Tensor, "U L"]:
    """The fall of each target token's log p when each unit of the source is hidden.

    A unit is positions of the source: a word's tokens, or one patch. `source` is a batch of one.
    """
    whole = log_p(model, source, target, start, end)[0]
    if not units:
        return whole.new_zeros(0, len(whole))
    places = model.encode(source).shape[1]
    hidden = torch.zeros(len(units), places, dtype=torch.bool)
    for number, unit in enumerate(units):
        hidden[number, list(unit)] = True
    many = source.expand(len(units), *source.shape[1:])
    with changed(model, hidden=hidden):
        without = log_p(model, many, target, start, end)
    return whole - without


@torch.inference_mode()
def effect_of_heads(
    model: nn.Module, heads: Sequence[HeadName], answer: Callable[[], Tensor]
) -> list[Tensor]:
    """The fall of an answer, such as log p, with each of these heads off."""
    whole = answer()
    falls = []
    for head in heads:
        with changed(model, off=[head]):
            falls.append(whole - answer())
    return falls
