"""Requests to models and their answers, without HTTP.

from regard.service import Service, Translate

with Service() as service:
    service.add("runs/en-de")
    (translation,) = service.ask(Translate(texts=("A dog runs on the beach.",)))

requests.py   requests, answers and refusals
service.py    the models, and the thread that computes
served.py     a model that is served; of the kinds in writers.py, translators.py, readers.py,
              sorters.py: from requests to sentences, and back; models.py loads one
batch.py      continuous batching over the engines' sessions
split.py      long texts in pieces
images.py     images, checked before they are decoded
corpus.py     files of any size, by many processes
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.service.requests import (
        About,
        Attend,
        Attention,
        Busy,
        Candidate,
        Classify,
        Delta,
        Generate,
        Label,
        Late,
        Limits,
        Lost,
        Read,
        Refused,
        Request,
        Scored,
        TooLarge,
        Translate,
        Translation,
        Unknown,
    )
    from regard.service.service import Service

__all__ = [
    "About",
    "Attend",
    "Attention",
    "Busy",
    "Candidate",
    "Classify",
    "Delta",
    "Generate",
    "Label",
    "Late",
    "Limits",
    "Lost",
    "Read",
    "Refused",
    "Request",
    "Scored",
    "Service",
    "TooLarge",
    "Translate",
    "Translation",
    "Unknown",
]


def __getattr__(name: str) -> object:
    """Imports on first use: requests are plain data, but the service imports torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Service":
        from regard.service.service import Service

        return Service
    from regard.service import requests

    return getattr(requests, name)
