"""Loads the model of a folder for the service."""

import os
import warnings
from pathlib import Path
from typing import Any

from regard.checkpoint import WEIGHTS
from regard.service.readers import ServedGenerator, ServedReader
from regard.service.served import Served
from regard.service.sorters import ServedClassifier, ServedLabeler
from regard.service.translators import ServedTranslator
from regard.task.folder import model_folder
from regard.task.load import load_in
from regard.task.settings import Precision


def load_served(
    name: str, folder: str | os.PathLike[str], *, device: str, precision: Precision, version: int
) -> Served:
    """Loads the model of a folder for the service."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's reason says the same
        predictor, _ = load_in(folder, device, precision)
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
