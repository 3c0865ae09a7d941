"""Custom parts: where a model differs from the one that its config builds.

Two parts of the same name are alike if they have the same class, the same `extra_repr`, and no
method that was replaced on the instance. So `extra_repr` has to name every attribute that changes
results. Weights, and ties between them, are compared when they are loaded; hooks never are.
"""

from torch import nn

from regard.model.quantized import QuantizedLinear


def differing_parts(model: nn.Module, plain: nn.Module) -> dict[str, str]:
    """The model's parts that are unlike those of the plain one, by name, with class and settings.

    Parts that only the plain one has are "absent".
    """
    have, want = _descriptions(model), _descriptions(plain)
    unlike = [name for name in {**have, **want} if have.get(name) != want.get(name)]
    return {name: have[name][1] if name in have else "absent" for name in unlike}


def _descriptions(model: nn.Module) -> dict[str, tuple[type[nn.Module], str]]:
    return {name: _description(part) for name, part in model.named_modules(remove_duplicate=False)}


def _description(part: nn.Module) -> tuple[type[nn.Module], str]:
    # Weights of 8 bits are a way to store a linear layer.
    kind = nn.Linear if isinstance(part, QuantizedLinear) else type(part)
    if kind.__module__.startswith("torch."):
        # Torch's extra_repr changes from version to version; LayerNorm's has gained a bias.
        names = getattr(kind, "__constants__", ())
        settings = ", ".join(f"{name}={getattr(part, name, None)}" for name in names)
    else:
        settings = " ".join(part.extra_repr().split())
    text = f"{kind.__name__}({settings})"
    replaced = replaced_methods(part)
    return kind, text + (f" with another {', '.join(replaced)}" if replaced else "")


def replaced_methods(part: nn.Module) -> list[str]:
    """The methods that were replaced on the instance."""
    kind = type(part)
    names = [name for name, value in vars(part).items() if callable(value)]
    return [name for name in names if callable(getattr(kind, name, None))]
