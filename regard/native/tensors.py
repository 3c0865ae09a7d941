"""Tensors as kernels read them."""

import ctypes

import torch
from torch import Tensor

from regard.native.build import Int, Pointer, Source, fields

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels in float32 compute, half precision as torch does on a CPU."""


def serves(source: Source, *tensors: Tensor) -> bool:
    """Whether kernels may compute with these: on a CPU, while nobody traces what is computed."""
    return (
        all(tensor.device.type == "cpu" for tensor in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and source.library() is not None
    )


class Tokens(ctypes.Structure):
    """As in tokens.h."""

    _fields_ = fields((Pointer, "data"), (Int, "token head"))

    @classmethod
    def of(cls, x: Tensor) -> "Tokens":
        """(1, H, T, K), which the caller keeps alive."""
        return cls(x.data_ptr(), x.stride(2), x.stride(1))


def dense(x: Tensor) -> Tensor:
    """With the width without gaps."""
    return x if x.stride(3) == 1 else x.contiguous()


def empty(like: Tensor, width: int) -> Tensor:
    """(1, H, T, width), with the heads of a token side by side."""
    _, H, T, _ = like.shape
    return like.new_empty(1, T, H, width).transpose(1, 2)
