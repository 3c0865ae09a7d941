"""Linear layers with 8-bit weights, which take a quarter of the space of float32 in a folder.

    w_nk ≈ t_n q_nk,     t_n = max |w_n| / 127,  q_nk an integer from -127 to 127

On any device they compute with dequantized weights, W = t ⊙ q. A CPU has kernels that compute with
the integers themselves: `decode/engine/int8` packs them for these.
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
    """A linear layer whose weights are integers, with a scale for each row."""

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
            integers, scale = round_rows(weight)
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b N"]:
        weight = dequantize(self.integers, self.scale).to(x.dtype)
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def train(self, mode: bool = True) -> "QuantizedLinear":
        if mode:
            raise ValueError("8-bit layers cannot be trained; train the model before quantizing it")
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


def round_rows(x: Float[Tensor, "R D"]) -> tuple[Int8[Tensor, "R D"], Float[Tensor, "R"]]:
    """Integers from -127 to 127, and each row's scale: NaN if not all of the row is finite."""
    largest = x.abs().amax(1)
    # The inverse of the smallest numbers would be infinite.
    factor = (127 / largest).clamp(max=torch.finfo(x.dtype).max).where(largest > 0, 0.0)
    integers = (x * factor[:, None]).round().nan_to_num(0.0).to(torch.int8)
    return integers, (largest / 127).where(largest.isfinite(), torch.nan)


def dequantize(integers: Int8[Tensor, "R D"], scale: Float[Tensor, "R"]) -> Float[Tensor, "R D"]:
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
    """Replaces every layer of exactly this type in a part, at any depth, by `new(layer)`.

    Only parts that call their layers are changed: others may read the weight itself.
    """
    for name, child in part.named_children() if _calls_layers(part) else ():
        if type(child) is old and not is_overridden(child):
            setattr(part, name, new(child))
        else:
            replace_linear(child, old, new)


def float_parts(model: nn.Module) -> list[str]:
    """Parts of the model's stacks whose linear layers `replace_linear` leaves unchanged."""

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
            continue  # no such layer: loading the weights will raise
        if type(child := getattr(part, last, None)) is nn.Linear:
            setattr(part, last, QuantizedLinear(child))


def float_weights(stored: Mapping[str, Tensor], ties: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """The same tensors with all weights dequantized.

    An output layer tied to the embedding's table takes that table, which was never rounded.
    """
    wide = dict(stored)
    for name in layers(stored):
        integers, scale = wide.pop(name + INTEGERS), wide.pop(name + SCALE)
        tied = next((names for names in ties if name + WEIGHT in names), ())
        if any(alias in stored for alias in tied):
            continue
        if integers.ndim != 2 or scale.shape != integers.shape[:1]:
            raise ValueError(
                f"{name}{SCALE} {tuple(scale.shape)} does not fit {name}{INTEGERS} "
                f"{tuple(integers.shape)}; restore the weights"
            )
        wide[name + WEIGHT] = dequantize(integers, scale)
    return wide
