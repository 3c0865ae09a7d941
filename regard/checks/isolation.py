"""Copies of models, and a place to run them in that leaves nothing behind."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.modules.module
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.machine.processes import one_line


def copy_model(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode; activations that the model holds lose their graph."""
    memo: dict[int, object] = {
        id(part): part.detach().clone()
        for module in model.modules()
        for part in tree_leaves(vars(module))
        if isinstance(part, Tensor) and not part.is_leaf
    }
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:
        kind, message = type(model).__name__, f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(
            f"{kind} cannot be copied ({message}); give it a __deepcopy__, or check its parts"
        ) from error


@contextmanager
def isolate() -> Iterator[None]:
    """Restores random numbers, the mode of gradients, and hooks registered for all modules."""
    hooks = [(registry, registry.copy()) for registry in global_hooks()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        for registry, before in hooks:
            registry.clear()
            registry.update(before)


@contextmanager
def exact_products() -> Iterator[None]:
    """Computes products of float32 without TF32 and bfloat16, whose rounding is 1,000 times as
    large and depends on the shapes."""
    backends: Any = torch.backends  # whose types lack some
    kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before):
            kind.fp32_precision = precision


def global_hooks() -> list[dict[int, Any]]:
    names = vars(torch.nn.modules.module)
    return [
        registry
        for name, registry in names.items()
        if name.startswith("_global_") and isinstance(registry, dict)
    ]
