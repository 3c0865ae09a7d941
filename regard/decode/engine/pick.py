"""Engines: how a decoding step is computed. Results do not depend on the engine.

    with open_session(model, source, lengths) as session:
        hypotheses = beam(session, prompts, end=2, max_length=50)

| engine | for | how |
|---|---|---|
| `eager` | every model, on every device: the reference | the model's own modules |
| `int8/` | 8-bit weights on a CPU | kernels that were compiled for this CPU |
| `cuda/` | CUDA | the model's own modules, captured in a graph, with kernels in some of them |

An engine is picked once for a model; `pick(model).reason` is why.
"""

import threading
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from regard.attention.core import is_observed
from regard.decode.engine.eager import EagerEngine
from regard.decode.engine.int8.linear import Int8Linear
from regard.decode.engine.parts import Model
from regard.decode.engine.session import Session
from regard.model.fits import check_cache
from regard.model.formula import cached
from regard.model.language import LanguageModel
from regard.model.lengths import Lengths


@runtime_checkable
class Engine(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str:
        """Why this engine runs."""

    def current(self, model: Model) -> bool:
        """True if the model is unchanged since the engine was made."""

    def open(
        self,
        model: Model,
        source: Tensor | None,
        lengths: Lengths,
        *,
        rows: int | None,
        beams: int,
        length: int,
    ) -> Session: ...

    def rows(self, length: int) -> int | None:
        """Rows of this length that it takes at once; None for any number."""


def open_session(
    model: Model,
    source: Tensor | None = None,
    lengths: Lengths = None,
    *,
    rows: int | None = None,
    beams: int = 1,
    length: int = 64,
    attention: bool = False,
) -> Session:
    """A session of rows to be decoded, which belongs to the caller.

    A Transformer reads a source for each row: text, padded (with lengths) or packed, images or
    audio. A language model has `rows` rows. Two hints size the KV cache: the beam size `beams`,
    and the `length` to which rows will grow. With `attention` the session reports the attention
    weights of each step, which a coverage penalty needs.
    """
    if model.training:
        raise ValueError(
            f"the {type(model).__name__} is in training, where dropout changes every step; "
            "call model.eval() first"
        )
    if (source is None) != isinstance(model, LanguageModel):
        what = "reads no source" if isinstance(model, LanguageModel) else "needs a source to read"
        raise ValueError(f"a {type(model).__name__} {what}")
    weight = next(model.parameters())
    count = rows if source is None else len(source if lengths is None else lengths)
    check_cache(model.config, count or 0, beams, length, weight.device, weight.element_size())
    if attention:
        session: Session = EagerEngine().open(model, source, lengths, rows=rows, attention=True)
    else:
        session = pick(model).open(model, source, lengths, rows=rows, beams=beams, length=length)
    cache = cached(model.config)
    session.cache_bytes = 0 if cache is None else cache.each * weight.element_size()
    return session


# An engine holds parts of its model, but never the model itself, which could not be freed then.
_picked: "WeakKeyDictionary[nn.Module, Engine]" = WeakKeyDictionary()
_one_at_a_time = threading.Lock()


def pick(model: Model) -> Engine:
    """The fastest engine that supports all parts of the model; cached until they change."""
    if is_observed(model):  # by this thread: others keep the engine that is cached
        return EagerEngine("attention is recorded or changed in this thread")
    with _one_at_a_time:
        engine = _picked.get(model)
        if engine is None or not engine.current(model):
            engine = _picked[model] = _choose(model)
        return engine


def _choose(model: Model) -> Engine:
    if isinstance(model.output, Int8Linear):
        from regard.decode.engine.int8.engine import Int8Engine

        refusal = Int8Engine.refusal(model)
        return EagerEngine(f"int8 kernels: {refusal}") if refusal else Int8Engine(model)
    if not model.output.weight.is_cuda:
        return EagerEngine(f"{model.output.weight.dtype} on the CPU: the model's modules")
    from regard.decode.engine.cuda.capture import CudaEngine

    refusal = CudaEngine.refusal(model)
    return EagerEngine(f"no graph is captured: {refusal}") if refusal else CudaEngine(model)
