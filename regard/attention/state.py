"""State dicts of other libraries: the error of `load_state_dict` names what reads them.

MultiHeadAttention(512, 8).load_state_dict(nn.MultiheadAttention(512, 8).state_dict())
ValueError: the state dict holds 'in_proj_weight', as another library names it; read it by
regard.interop.torch_nn.attention(state, heads=…)
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

LIBRARIES = (
    (r"(in_proj|q_proj)_weight", "torch_nn.attention(state, heads=…)"),
    (r"self_attn\.(in_proj|q_proj)_weight", "torch_nn.block(state, Layer(heads=…))"),
    (r"layers\.\d+\.self_attn\.in_proj_weight", "torch_nn.stack(state, Layer(heads=…))"),
    (r"encoder\.layers\.\d+\.self_attn\.in_proj_weight", "torch_nn.stacks(state, Layer(heads=…))"),
    (r"(.*\.)?attn\.qkv\.weight", "timm.from_timm(state, heads=…)"),
    (r"(.*\.)?embeddings\.patch_embeddings\..*", "vit.read(folder), or regard import FOLDER OUT"),
    (
        r"(model\.)?encoder\.layers\.\d+\.self_attn\.q_proj\.weight",
        "marian.read(folder), or regard import FOLDER OUT",
    ),
)
"""The name of a tensor in another library's state dict, and what in regard.interop reads it."""


def importer(names: Iterable[str]) -> str | None:
    """The line about another library's state dict; None for other names."""
    for name in sorted(names):
        for pattern, reader in LIBRARIES:
            if re.fullmatch(pattern, name):
                return (
                    f"the state dict holds {name!r}, as another library names it; read it by "
                    f"regard.interop.{reader}"
                )
    return None


class LoadableModule(nn.Module):
    """A module that names the importer of another library's state dict in its error."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copies a state dict of this class into the module, as every `nn.Module` does."""
        if line := importer(state_dict.keys() - self.state_dict().keys()):
            raise ValueError(line)
        return super().load_state_dict(state_dict, strict, assign)


def typed_as(function: Function) -> Callable[[Callable[..., Any]], Function]:
    """Gives `__call__` the signature of `forward`, for type checkers: torch's own returns Any."""
    return lambda method: function
