"""Linear layers with weights of 8 bits, as a model's folder stores them: a quarter of float32's.

    w_nk ≈ t_n q_nk,     t_n = max |w_n| / 127,  q_nk an integer from -127 to 127

On any device they compute with the weights widened again, W = t ⊙ q. A CPU has kernels that compute
with the integers themselves: `decode/engine/int8` packs them for those.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn

from regard.attention.multihead import MultiHeadAttention
from regard.model.block import Block, FeedForward, GatedFeedForward
from regard.model.stack import Stack

Model = TypeVar("Model", bound=nn.Module)

CALL_LAYERS = (
    *(Stack, Block, MultiHeadAttention, FeedForward, GatedFeedForward),
    *(nn.ModuleList, nn.Sequential),
)
"""Parts that use a linear layer by calling it; others, as `Dense`, read its weight."""

INTEGERS, SCALE, WEIGHT = ".integers", ".scale", ".weight"


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are integers, each row with a scale of its own."""

    integers: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        if weight.is_meta:
            integers, scale = weight.to(torch.int8), weight.new_empty(self.out_features)
        else:
            integers, scale = rounded(weight)
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b N"]:
        weight = widened(self.integers, self.scale).to(x.dtype)
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def train(self, mode: bool = True) -> "QuantizedLinear":
        if mode:
            raise ValueError("8-bit layers cannot be trained; train what they were made of")
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


def rounded(x: Float[Tensor, "R D"]) -> tuple[Int8[Tensor, "R D"], Float[Tensor, "R"]]:
    """Integers from -127 to 127, and each row's scale: NaN where not all of it is finite."""
    most = x.abs().amax(1)
    # Of the smallest numbers the inverse would be infinite.
    by = (127 / most).clamp(max=torch.finfo(x.dtype).max).where(most > 0, 0.0)
    integers = (x * by[:, None]).round().nan_to_num(0.0).to(torch.int8)
    return integers, (most / 127).where(most.isfinite(), torch.nan)


def widened(integers: Int8[Tensor, "R D"], scale: Float[Tensor, "R"]) -> Float[Tensor, "R D"]:
    return integers * scale[:, None]


def quantize(model: Model) -> Model:
    """Quantizes a model's stacks and its output layer, in place. Embeddings stay as they are."""
    if model.training:
        raise ValueError("8-bit layers cannot be trained; call model.eval() first")
    for part in model.modules():
        if type(part) is Stack:
            replace_linear(part, nn.Linear, QuantizedLinear)
    output = getattr(model, "output", None)
    if type(output) is nn.Linear and not is_overridden(output):
        model.output = QuantizedLinear(output)
    return model


def replace_linear(part: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Replaces every layer of exactly this type in a part, however deep, by one made of it.

    Only in parts that call their layers: others may read a weight, and keep it.
    """
    for name, child in part.named_children() if _calls_layers(part) else ():
        if type(child) is old and not is_overridden(child):
            setattr(part, name, new(child))
        else:
            replace_linear(child, old, new)


def float_parts(model: nn.Module) -> list[str]:
    """Parts of the model's stacks whose linear layers `replace_linear` leaves as they are."""

    def search(name: str, part: nn.Module) -> Iterator[str]:
        if not _calls_layers(part):
            if any(isinstance(layer, nn.Linear) for layer in part.modules()):
                yield f"{name} ({type(part).__name__})"
            return
        for child_name, child in part.named_children():
            yield from search(f"{name}.{child_name}", child)

    stacks = (named for named in model.named_modules() if isinstance(named[1], Stack))
    return [part for name, stack in stacks for part in search(name, stack)]


def _calls_layers(part: nn.Module) -> bool:
    return type(part) in CALL_LAYERS and "forward" not in vars(part)


def is_overridden(layer: nn.Module) -> bool:
    """True if calling a layer runs a hook, or another `forward` than its class's."""
    return bool("forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks)


# In a folder


def layers(stored: Mapping[str, Tensor]) -> list[str]:
    """The names of the layers that are stored in 8 bits."""
    return [
        name.removesuffix(INTEGERS)
        for name in stored
        if name.endswith(INTEGERS) and name.removesuffix(INTEGERS) + SCALE in stored
    ]


def make_room(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Replaces the layers of an unfilled model that are stored in 8 bits."""
    for name in layers(stored):
        above, _, last = name.rpartition(".")
        try:
            part = model.get_submodule(above)
        except AttributeError:
            continue  # no such layer: the load will say so
        if type(child := getattr(part, last, None)) is nn.Linear:
            setattr(part, last, QuantizedLinear(child))


def float_weights(stored: Mapping[str, Tensor], ties: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """The same tensors with all weights widened.

    An output layer that shares the embedding's table takes that table, which was never rounded.
    """
    wide = dict(stored)
    for name in layers(stored):
        integers, scale = wide.pop(name + INTEGERS), wide.pop(name + SCALE)
        tied = next((names for names in ties if name + WEIGHT in names), ())
        if any(one in stored for one in tied):
            continue
        if integers.ndim != 2 or scale.shape != integers.shape[:1]:
            raise ValueError(
                f"{name}{SCALE} {tuple(scale.shape)} does not fit {name}{INTEGERS} "
                f"{tuple(integers.shape)}; restore the weights"
            )
        wide[name + WEIGHT] = widened(integers, scale)
    return wide
