"""A model as a notebook shows it: its config, and how many parameters each part has."""

from dataclasses import asdict, is_dataclass

from torch import nn

from regard.attention.notebook import facts


def model_html(model: nn.Module) -> str:
    """Settings, and parameters by part; shared ones count once, where they are first met."""
    seen: set[int] = set()
    parts = {}
    for name, part in model.named_children():
        new = {id(one): one.numel() for one in part.parameters() if id(one) not in seen}
        seen |= new.keys()
        if new:
            parts[name] = sum(new.values())
    loose = [one for one in model.parameters() if id(one) not in seen]
    total = sum(parts.values()) + sum({id(one): one.numel() for one in loose}.values())
    config = getattr(model, "config", None)
    settings = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    rows: dict[str, object] = {f"{name}": f"{count:,} parameters" for name, count in parts.items()}
    rows |= {name: value for name, value in settings.items() if value is not None}
    weight = next(model.parameters(), None)
    where = ""
    if weight is not None:
        where = f", {str(weight.dtype).removeprefix('torch.')} on {weight.device}"
    return facts(f"{type(model).__name__}, {total:,} parameters{where}", rows)
