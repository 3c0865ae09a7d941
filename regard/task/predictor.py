"""Predictors: trained models with their tokenizers or labels, as `regard.load` returns them.

| class | method | from | to |
|---|---|---|---|
| `Translator` | `translate(texts)` | texts | their translations |
| `Classifier` | `classify(images)` | images | a label for each |
| `Reader` | `read(images)` | images | the text in each |
| `Labeler` | `label(texts)` | texts | a label for each |
| `Generator` | `generate(prompts)` | prompts | texts that begin with them |
| `TextEmbedder` | `encode(texts)` | texts | a vector for each |
"""

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

import regard
from regard.attention.notebook import facts
from regard.decode.engine.ensemble import Weights
from regard.decode.engine.int8.linear import Int8Linear
from regard.machine.device import use
from regard.model.notebook import model_html
from regard.model.quantized import QuantizedLinear
from regard.synonyms import suggest_names

if TYPE_CHECKING:
    from regard.task.pictures import Picture
else:
    Picture = object

Same = TypeVar("Same", bound="Predictor")


class Predictor:
    """A trained model, ready for use with its tokenizer or its labels.

    `regard.load(folder)` returns one of its subclasses: a `Translator`, `Classifier`, `Reader`,
    `Labeler`, `Generator` or `TextEmbedder`. A predictor that is called with a list returns a
    result for each item, and with a single text or file one result. A method of another kind of
    predictor raises a ValueError that names the right one.

    >>> import regard
    >>> predictor = regard.load("runs/en-de")
    >>> type(predictor).__name__
    'Translator'
    >>> len(predictor(["A dog.", "A cat."]))
    2
    >>> predictor.classify(["cat.png"])
    Traceback (most recent call last):
    ...
    ValueError: runs/en-de holds a Translator, not a Classifier; call .translate(texts)
    """

    model: nn.Module
    """The model, in evaluation mode."""
    _call: ClassVar[str] = ""
    """How its main method is called."""
    _folder: str = ""
    """The model's folder, if there is one."""

    def __init_subclass__(cls) -> None:
        public = [name for name in vars(cls) if not name.startswith("_")]
        suggest_names(cls, ["__init__", *public])

    @classmethod
    @suggest_names
    def load(
        cls: type[Same],
        folder: str | os.PathLike[str],
        *others: str | os.PathLike[str],
        weights: Weights | None = None,
        model: nn.Module | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        verify: bool = True,
    ) -> Same:
        """Loads the model of a folder as `regard.load` does; raises if it is of another kind.

        >>> from regard import Classifier
        >>> Classifier.load("runs/pets").labels
        ['cat', 'dog']
        """
        predictor = regard.load(
            folder,
            *others,
            weights=weights,
            model=model,
            device=device,
            dtype=dtype,
            verify=verify,
        )
        if not isinstance(predictor, cls):
            predictor._refuse(cls.__name__)
        return predictor

    @overload
    def __call__(self, inputs: str, /) -> str | Tensor: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, inputs: Sequence[str], /) -> list[str] | Tensor: ...
    def __call__(self, inputs: str | Sequence[str], /) -> str | list[str] | Tensor:
        """The result for one text or file, or a result for each of a list."""
        raise NotImplementedError

    def translate(
        self, texts: Sequence[str], *, beams: int | None = None, batch: int | None = None
    ) -> list[str]:
        """Translates texts; see `Translator`."""
        self._refuse("Translator")

    def classify(self, images: "Iterable[Picture]", *, batch: int = 64) -> list[str]:
        """Classifies images; see `Classifier`."""
        self._refuse("Classifier")

    def read(
        self, images: "Iterable[Picture]", *, beams: int | None = None, batch: int = 64
    ) -> list[str]:
        """Reads the text in images; see `Reader`."""
        self._refuse("Reader")

    def label(self, texts: Sequence[str]) -> list[str]:
        """Classifies texts; see `Labeler`."""
        self._refuse("Labeler")

    def generate(
        self,
        prompts: Sequence[str],
        *,
        length: int = 200,
        temperature: float | int = 0.8,
        top_k: int | None = None,
        top_p: float | int | None = 0.95,
        seed: int = 0,
        first: int = 0,
        batch: int = 64,
    ) -> list[str]:
        """Continues prompts; see `Generator`."""
        self._refuse("Generator")

    def encode(self, texts: Sequence[str], *, batch: int = 4096) -> Float[Tensor, "B D"]:
        """Computes a vector for each text (B, D); see `TextEmbedder`."""
        self._refuse("TextEmbedder")

    def fill(self, texts: Sequence[str], *, best: int = 5) -> list[list[tuple[str, float]]]:
        """Fills in the [MASK] of each text; see `TextEmbedder`."""
        self._refuse("TextEmbedder")

    def ensemble(self: Same, others: Sequence[Same], weights: Weights | None = None) -> "Predictor":
        """Joins predictors that choose every token together; see `Translator` and `Generator`."""
        raise ValueError(
            f"a {type(self).__name__} cannot be in an ensemble; translators and language models can"
        )

    def _refuse(self, kind: str) -> NoReturn:
        raise ValueError(
            f"{self._folder or 'this'} holds a {type(self).__name__}, not a {kind}; "
            f"call .{self._call}"
        )

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(chain(self.model.parameters(), self.model.buffers())).device

    def to(self: Same, device: str | torch.device) -> Same:
        """Moves the model to a device, and returns this predictor; "auto" is a GPU if there is one.

        >>> import regard
        >>> regard.load("runs/en-de").to("cpu").device
        device(type='cpu')
        """
        place = use(device)
        if place.type != "cpu" and any(map(has_8_bits, self._models())):
            raise ValueError(
                f"8-bit weights are for the cpu, not for {place}; load the model with a dtype, "
                "such as torch.bfloat16"
            )
        for model in self._models():
            model.to(place)
        return self

    def _models(self) -> Sequence[nn.Module]:
        """All models of an ensemble."""
        return [self.model]

    def __dir__(self) -> list[str]:
        """The names of this kind of predictor, without the methods that only raise."""
        cls = type(self)
        return [
            name
            for name in super().__dir__()
            if name not in _METHODS or getattr(cls, name) is not getattr(Predictor, name)
        ]

    def _facts(self) -> dict[str, object]:
        """Properties of this kind of predictor, for `repr`."""
        return {}

    def __repr__(self) -> str:
        config = getattr(self.model, "config", None)
        names = ("encoder_layers", "decoder_layers")
        both = " + ".join(str(getattr(config, name)) for name in names if hasattr(config, name))
        rows: dict[str, object] = {
            "width": getattr(config, "width", None),
            "layers": getattr(config, "layers", both or None),
            "parameters": f"{parameter_count(self.model):,}",
            **self._facts(),
            "device": self.device,
        }
        shown = ", ".join(f"{name} {value}" for name, value in rows.items() if value is not None)
        return f"{type(self).__name__}({self._folder!r}, {type(self.model).__name__}, {shown})"

    def _repr_html_(self) -> str:
        rows = {"folder": self._folder, **self._facts()}
        return facts(type(self).__name__, rows, model_html(self.model))


_METHODS = ("translate", "classify", "read", "label", "generate", "encode", "fill", "ensemble")


def parameter_count(model: nn.Module) -> int:
    """The number of a model's parameters; those of 8-bit layers count as before quantization."""
    if has_8_bits(model):
        with torch.device("meta"):
            model = type(model)(model.config)
    return sum(parameter.numel() for parameter in model.parameters())


def has_8_bits(model: nn.Module) -> bool:
    return any(isinstance(part, Int8Linear | QuantizedLinear) for part in model.modules())


def listed(names: Sequence[str], count: int = 5) -> str:
    """The number of names, and the first of them."""
    more = ", …" if len(names) > count else ""
    return f"{len(names)} ({', '.join(names[:count])}{more})"
