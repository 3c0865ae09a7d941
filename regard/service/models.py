"""From a folder to a model that is served."""

import os
import warnings
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from regard.checkpoint import WEIGHTS
from regard.device import device as named_device
from regard.service.readers import ServedGenerator, ServedReader
from regard.service.served import Served
from regard.service.sorters import ServedClassifier, ServedLabeler
from regard.service.translators import ServedTranslator
from regard.task.folder import model_folder
from regard.task.load import load

Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "int8"]


def load_served(
    name: str, folder: str | os.PathLike[str], *, device: str, precision: Precision, version: int
) -> Served:
    """A folder's model, ready to be asked."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    quantized = precision == "int8"
    if device == "auto":
        device = "cpu" if quantized else named_device("auto").type
    if quantized and device != "cpu":
        raise ValueError(f"precision (int8) is for device cpu, not {device}; try bf16")
    predictor: Any = load(folder, device=device, dtype=dtypes.get(precision, torch.float32))
    if quantized:
        from regard.decode.engine.int8.linear import int8

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said by the engine's reason
            int8(predictor.model)
    return served(name, Path(folder), predictor, version)


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
