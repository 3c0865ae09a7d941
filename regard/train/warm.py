"""What a GPU needs before its first step, made ready in the background while data are read."""

import importlib
import importlib.util
import threading

import torch


def warm_up(device: torch.device) -> None:
    """Returns at once. Nothing depends on it: what fails here fails again where it is needed."""
    if device.type == "cuda":
        threading.Thread(target=_prepare, args=(device,), daemon=True).start()


def _prepare(device: torch.device) -> None:
    try:
        some = torch.zeros(16, 16, device=device)
        some.mm(some)
        if importlib.util.find_spec("triton") is not None:
            importlib.import_module("triton")
    except (ImportError, RuntimeError):
        return
