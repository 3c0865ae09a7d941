"""Properties of a model's parts that decide which engine can run it."""

import math
from typing import cast

from torch import nn

from regard.attention import fusing
from regard.attention.core import Core
from regard.attention.multihead import MultiHeadAttention
from regard.model.custom import replaced_methods
from regard.model.embedding import Tokens
from regard.model.language import LanguageModel
from regard.model.lengths import keeps_lengths
from regard.model.transformer import Transformer

Model = Transformer | LanguageModel


def modules(model: nn.Module) -> list[nn.Module]:
    """All submodules, like `model.modules()` in a fifth of the time: they are compared at every
    batch."""
    parts = [part for part in model._modules.values() if part is not None]
    for part in parts:  # and those that are appended meanwhile
        if part._modules:
            parts += [child for child in part._modules.values() if child is not None]
    return parts


def has_hooks(parts: list[nn.Module]) -> bool:
    """True if calling one of them runs other code than its class's `forward`, or more."""
    return fusing.has_hooks(*parts)


def overridden(model: nn.Module) -> str:
    """The part with a hook or another method than the library's; empty if there is none."""
    if not has_hooks(modules(model)):
        return _replaced(model)
    if fusing.has_hooks():
        return "hooks are registered for all modules"
    parts = ((name, part) for name, part in model.named_modules() if part is not model)
    name, part = next((name, part) for name, part in parts if fusing.has_hooks(part))
    return f"{name} has a " + ("forward of its own" if "forward" in vars(part) else "hook")


def _replaced(model: nn.Module) -> str:
    kinds = type(model).__mro__
    library = next(kind for kind in kinds if kind.__module__.startswith("regard."))
    own = {name for kind in kinds[: kinds.index(library)] for name in vars(kind)}
    own |= set(replaced_methods(model))
    # Engines do not call the model itself.
    if names := sorted(name for name in own - {"forward"} if _is_method(library, name)):
        return f"{type(model).__name__} has another {names[0]} than {library.__name__}"
    for name, part in model.named_modules():
        if part is not model and (names := replaced_methods(part)):
            return f"{name} has another {names[0]} than its class"
    return ""


def _is_method(kind: type, name: str) -> bool:
    return not name.startswith("__") and callable(getattr(kind, name, None))


def target(model: Model) -> Tokens:
    """The embedding of the tokens that are decoded."""
    return model.target if isinstance(model, Transformer) else model.tokens


def reads_otherwise(model: nn.Module) -> str:
    """The reason why the memory's lengths may differ from the source's; empty if they do not."""
    if isinstance(model, Transformer):
        for name, part in (("source", model.source), ("encoder", model.encoder)):
            if not keeps_lengths(part):
                return f"its {name} is a {type(part).__name__}, which may change lengths"
    return ""


def unusual(part: nn.Module) -> str:
    """The property of an attention that no kernel supports; empty for softmax(beta q·k) v."""
    if type(part) is not MultiHeadAttention or type(part.core) is not Core:
        return f"another attention, {type(part).__name__}"
    if part.core.score is not None:
        return f"another score, {type(part.core.score).__name__}"
    beta = part.core.beta
    if beta is not None and not (isinstance(beta, float | int) and 0 <= beta < math.inf):
        return "a beta that is no plain number"
    return ""


def scale(part: MultiHeadAttention) -> float:
    """The softmax scale of a standard attention layer."""
    beta = part.core.beta
    return 1 / math.sqrt(part.key_width) if beta is None else float(cast(float, beta))
