"""Why another library has no such model, and which settings of a training would have made one."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from regard.checkpoint import standard_model
from regard.model.build import BlockConfig


@dataclass(frozen=True)
class Obstacle:
    """One thing that the other library has no place for."""

    reason: str
    """What that library has instead: `its norms come after each residual sum`."""
    flag: str | None = None
    """The setting of `regard train` that avoids it; None where there is none."""


def refuse(library: str, obstacles: Sequence[Obstacle], preset: str | None = None) -> None:
    """Names all obstacles at once, and how to train a model without them.

    `preset` is the one flag that sets all of them, where there is one.
    """
    if not obstacles:
        return
    text = f"{library} has no such model: {'; '.join(o.reason for o in obstacles)}"
    flags = [o.flag for o in obstacles if o.flag is not None]
    if len(flags) == len(obstacles):
        short = f"{preset}, or " if preset else ""
        text += f"; a model that is trained with {short}{' '.join(flags)} can be exported"
    raise ValueError(text)


def other_mixing(config: BlockConfig) -> list[Obstacle]:
    """The obstacles of a model whose tokens mix by other means than full attention."""
    obstacles = []
    if config.window is not None:
        text = f"its self-attention has no window ({config.window})"
        obstacles.append(Obstacle(text, "--model.window None"))
    if config.mixer != "attention":
        text = f"its blocks have self-attention, not {config.mixer}"
        obstacles.append(Obstacle(text, "--model.mixer attention"))
    return obstacles


def own_parts(model: nn.Module) -> list[Obstacle]:
    """The first part that is of another class than the config names."""
    standard = standard_model(model) or nn.Module()
    classes = {name: type(part) for name, part in standard.named_modules(remove_duplicate=False)}
    for name, part in model.named_modules(remove_duplicate=False):
        if classes.pop(name, None) is not type(part):
            kind = type(part).__name__
            return [Obstacle(f"{name or 'the model'} is a {kind}, which its writer does not know")]
    return [Obstacle(f"{name} is missing") for name in [*classes][:1]]
