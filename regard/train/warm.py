"""What training needs to begin, made ready in the background while data are read."""

import importlib
import importlib.util
import threading

import torch


def warm_up(device: torch.device) -> None:
    """Returns at once. Nothing depends on it: what fails here fails again where it is needed."""
    threading.Thread(target=_prepare, args=(device,), daemon=True).start()


def _prepare(device: torch.device) -> None:
    try:
        if device.type == "cuda":
            torch.zeros(16, 16, device=device).mm(torch.zeros(16, 16, device=device))
            if importlib.util.find_spec("triton") is not None:
                importlib.import_module("triton")
        importlib.import_module("torch._dynamo")  # which torch.optim imports at its first step
    except (ImportError, RuntimeError):
        return
