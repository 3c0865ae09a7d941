"""The device that a setting names, checked before anything is computed."""

import torch


def device(name: str | torch.device) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one, and the CPU otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(name)
    except RuntimeError as error:
        known = str(error).splitlines()[0]
        raise ValueError(f'device ("{name}") is not one that torch knows: {known}') from None
    if named.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ValueError(f'device ("{name}") needs a GPU, and torch finds none; try "cpu"')
        if (named.index or 0) >= count:
            raise ValueError(f'device ("{name}") is not there; the last is "cuda:{count - 1}"')
    return named
