"""From a folder to a model that is served."""

import os
import warnings
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from regard.checkpoint import WEIGHTS
from regard.decode.engine.int8.linear import int8
from regard.device import device as named_device
from regard.service.readers import ServedGenerator, ServedReader
from regard.service.served import Served
from regard.service.sorters import ServedClassifier, ServedLabeler
from regard.service.translators import ServedTranslator
from regard.task.folder import model_folder
from regard.task.load import load
from regard.task.precision import DTYPES, SAMPLE, Writes, on_gpu, settle
from regard.task.translator import Translator

Precision: TypeAlias = Literal["auto", "fp32", "bf16", "fp16", "int8"]


def load_served(
    name: str, folder: str | os.PathLike[str], *, device: str, precision: Precision, version: int
) -> Served:
    """A folder's model, ready to be asked."""
    quantized = precision == "int8"
    if device == "auto":
        device = "cpu" if quantized else named_device("auto").type
    if quantized and device != "cpu":
        raise ValueError(f"precision (int8) is for device cpu, not {device}; try bf16")
    if precision == "auto" and device != "cpu":
        precision = on_gpu(named_device(device)).precision
    predictor: Any = load(folder, device=device, dtype=DTYPES.get(precision, torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said by the engine's reason
        if quantized:
            int8(predictor.model)
        elif precision == "auto" and isinstance(predictor, Writes):
            settle(predictor, _inputs(predictor), model_folder(folder))
    return served(name, Path(folder), predictor, version)


def _inputs(predictor: Any) -> list[str]:
    """What a translator was validated on, where that is still there: nobody has asked yet."""
    if not isinstance(predictor, Translator):
        return []
    try:
        return [source for source, _ in predictor.validated()[:SAMPLE]]
    except (OSError, ValueError):
        return []


def weights_size(folder: str | os.PathLike[str]) -> int:
    """Bytes of a folder's weights, without reading them."""
    return (model_folder(folder) / WEIGHTS).stat().st_size


def served(name: str, folder: Path, predictor: Any, version: int) -> Served:
    kinds = (ServedTranslator, ServedReader, ServedGenerator, ServedClassifier, ServedLabeler)
    for kind in kinds:
        if type(predictor).__name__ == kind.predictor:
            return kind(name, folder, predictor, version)
    raise ValueError(
        f"{folder} holds a {type(predictor).__name__}, which answers nothing by itself; serve "
        f"what starts from it: regard train label NEW --texts FILE --start {folder}"
    )
