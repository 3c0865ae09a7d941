"""Linear layers with weights quantized to 8 bits, for decoding on a CPU.

    y_rn = s_r t_n Σ_k q_rk w_nk + b_n,     s_r = max |x_r| / 127,  t_n = max |w_n| / 127

Weights are a quarter as large, and integer arithmetic is several times as fast. Each row of x has
its own scale s_r, so that a row gives the same result whatever else is in the batch: with one
scale for all of it, a row of large numbers would round one of small numbers to zero.
"""

import ctypes
import warnings
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8, Int32
from torch import Tensor, nn

from regard.decode.engine.int8 import library as native
from regard.model.quantized import QuantizedLinear, is_overridden, replace_linear, round_rows
from regard.model.stack import Stack
from regard.native.build import address

Model = TypeVar("Model", bound=nn.Module)

EXACT = 2**24 // 127**2
"""Number of products whose sum is exact in float32."""

WIDEST = (2**31 - 1) // 127**2
"""Number of products whose sum fits into 32 bits; partial sums may wrap around."""


class Int8Linear(nn.Module):
    """A linear layer with its weights quantized once, each row with its own scale."""

    packed: Tensor
    start: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear | QuantizedLinear):
        super().__init__()
        weight = linear.weight if isinstance(linear, nn.Linear) else linear.integers
        if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.int8):
            raise ValueError(
                f"8-bit layers are made of float32 weights on the cpu, not of {weight.dtype} on "
                f"{weight.device}; load the model with precision fp32 on the cpu first"
            )
        if linear.in_features > WIDEST:
            raise ValueError(
                f"an 8-bit layer can read at most {WIDEST} numbers, not {linear.in_features}, "
                "for its sums to fit into 32 bits"
            )
        self.in_features, self.out_features = linear.in_features, linear.out_features
        quantized = QuantizedLinear(linear) if isinstance(linear, nn.Linear) else linear
        integers, scale = quantized.integers, quantized.scale
        start = torch.zeros(self.out_features, dtype=torch.int32)
        bias = scale.new_zeros(self.out_features) if quantized.bias is None else quantized.bias
        library = native.library()
        self.native = library is not None
        if library is not None:
            columns, depth, offset = (ctypes.c_int64 * 3).in_dll(library, "packing")
            # Kernels add an offset to activations: sums start with its contribution subtracted.
            start = -offset * integers.sum(1, dtype=torch.int32)
            more = (0, -self.out_features % columns)
            start, scale, bias = (F.pad(x, more) for x in (start, scale, bias))
            integers = pack(integers, columns, depth)
        for name, x in (("packed", integers), ("start", start), ("scale", scale), ("bias", bias)):
            self.register_buffer(name, x.clone(), persistent=False)

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b N"]:
        if x.shape[-1] != self.in_features or x.dtype != torch.float32 or x.device.type != "cpu":
            raise ValueError(
                f"x of shape {tuple(x.shape)}, {x.dtype} on {x.device} must be "
                f"{self.in_features} wide, float32 on the cpu, where 8-bit layers are"
            )
        rows = x.reshape(-1, self.in_features)
        return self._product(rows.contiguous()).view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor) -> Tensor:
        library = native.library() if self.native else None
        if library is None:
            integers, scale = round_rows(x)
            return (
                product(integers, self.packed).float() * (scale[:, None] * self.scale) + self.bias
            )
        y = x.new_empty(len(x), self.out_features)
        threads = torch.get_num_threads()
        library.linear(self.address(), x.data_ptr(), len(x), y.data_ptr(), threads)
        return y

    def address(self) -> native.Linear:
        """The struct that the kernels receive."""
        tensors = map(address, (self.packed, self.start, self.scale, self.bias))
        return native.Linear(self.in_features, self.out_features, *tensors)

    def train(self, mode: bool = True) -> "Int8Linear":
        if mode:
            raise ValueError("8-bit layers cannot be trained; train what they were made of")
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Weights of the model that this was made of would be passed over: they are refused."""
        *_, errors = rest
        if any(name.startswith(prefix) for name in state_dict):
            errors.append(
                f"the weights for {prefix[:-1]} are for a layer that is not of 8 bits; load them "
                "first, and then call int8"
            )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


def product(x: Int8[Tensor, "R D"], w: Int8[Tensor, "N D"]) -> Int32[Tensor, "R N"]:
    """Σ_k x_rk w_nk, exactly.

    torch's own product of 8-bit integers saturates its partial sums on CPUs without VNNI. In
    float32 integers below 2^24 are exact, in whatever order they are added, and so are their
    products in bfloat16, should torch be allowed to use it.
    """
    sums = torch.zeros(len(x), len(w), dtype=torch.int32)
    for a, b in zip(x.split(EXACT, dim=1), w.split(EXACT, dim=1)):
        sums += (a.float() @ b.float().T).int()
    return sums


def pack(weight: Int8[Tensor, "N D"], columns: int, depth: int) -> Int8[Tensor, "n d c k"]:
    """As kernels read it: blocks of outputs, and in each all inputs, `depth` at a time."""
    N, D = weight.shape
    padded = F.pad(weight, (0, -D % depth, 0, -N % columns))
    return padded.view(-1, columns, padded.shape[1] // depth, depth).transpose(1, 2).contiguous()


def int8(model: Model) -> Model:
    """Quantizes a model's stacks and its output layer to 8-bit weights, in place.

    These take a quarter of the memory. Custom parts, and those with another `forward`, stay
    float32: they may read a weight. The model is for inference alone: it cannot be trained, and
    is saved by `regard quantize`. Embeddings stay as they are.
    """
    if model.training:
        raise ValueError("8-bit layers cannot be trained; call model.eval() first")
    if reason := native.missing():
        warnings.warn(f"8-bit layers run through torch, and slower: {reason}", stacklevel=2)
    for kind in (nn.Linear, QuantizedLinear):
        for part in model.modules():
            if type(part) is Stack:
                replace_linear(part, kind, Int8Linear)
    output = getattr(model, "output", None)
    for kind in (nn.Linear, QuantizedLinear):
        if type(output) is kind and not is_overridden(output):
            model.output = Int8Linear(output)
    return model
