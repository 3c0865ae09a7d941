"""What clients send and get, as pydantic checks it and the OpenAPI document describes it."""

import base64
import binascii
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from regard.service.requests import Refused

MANY = 10_000
"""Items of a list, whatever the limits say."""

Name = Annotated[str, Field(max_length=200)]
Text = Annotated[str, Field(max_length=10_000_000)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MANY)]
Encoded = Annotated[str, Field(max_length=100_000_000, json_schema_extra={"format": "byte"})]
Whole = Annotated[int, BeforeValidator(lambda number: _whole(number))]
Count = Annotated[Whole, Field(ge=1, le=2**31)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _whole(number: object) -> object:
    """To JSON, 5.0 is as good a whole number as 5."""
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number


class Body(BaseModel):
    """Nothing unknown, and nothing converted: a number is no text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Name | None = Field(None, description="Which model; needed where several could answer.")
    seconds: Seconds | None = Field(None, description="Give up after so long.")


class TranslateBody(Body):
    text: Text | Texts = Field(description="A text, or a list of texts.")
    beams: Count | None = Field(None, description="Beam size; 1 is greedy search.")
    n_best: Count = Field(1, description="How many translations of each text.")
    format: Literal["text", "html"] = Field("text", description="In HTML, tags are kept.")
    stream: bool = Field(False, description="Send what is ready as server-sent events.")


class GenerateBody(Body):
    prompt: Text | Texts
    length: Count = Field(200, description="New tokens, at most.")
    temperature: float = Field(0.8, ge=0, le=100, description="0 takes the likeliest token.")
    top_k: Count | None = None
    top_p: float | None = Field(0.95, gt=0, le=1)
    seed: Whole = Field(0, ge=0, lt=2**63)
    stream: bool = False


class LabelBody(Body):
    text: Text | Texts
    top: Count = Field(1, description="How many labels of each text.")


class ClassifyBody(Body):
    image: Encoded | Annotated[list[Encoded], Field(min_length=1, max_length=MANY)] = Field(
        description="Image files in base64. A single one can also be the body itself."
    )
    top: Count = Field(1, description="How many labels of each image.")


class ReadBody(Body):
    image: Encoded | Annotated[list[Encoded], Field(min_length=1, max_length=MANY)]
    beams: Count | None = None
    stream: bool = False


class AttentionBody(Body):
    text: Text | None = None
    image: Encoded | None = None
    written: Text | None = Field(None, description="What the model is made to write.")


class LibreBody(BaseModel):
    """LibreTranslate's. Its clients send more than this, which is ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    q: Text | Texts
    source: Annotated[str, Field(max_length=40)] = "auto"
    target: Annotated[str, Field(max_length=40)] = ""
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, le=1000)] = 0
    api_key: Annotated[str, Field(max_length=1000)] | None = None


# Answers, for the document


class CandidateAnswer(BaseModel):
    text: str
    score: float


class TranslationAnswer(CandidateAnswer):
    alternatives: list[CandidateAnswer]


class TranslateAnswer(BaseModel):
    translations: list[TranslationAnswer]


class TextsAnswer(BaseModel):
    texts: list[str]


class Labelled(BaseModel):
    label: str
    probability: float


class LabelsAnswer(BaseModel):
    labels: list[list[Labelled]]


class AttentionAnswer(BaseModel):
    text: str
    source: list[str]
    target: list[str]
    weights: list[Any]
    alignment: list[list[int]]


class ModelAnswer(BaseModel):
    name: str
    task: str
    engine: str
    parameters: int
    loaded: bool
    version: int
    labels: list[str]


class ModelsAnswer(BaseModel):
    models: list[ModelAnswer]


class LibreAnswer(BaseModel):
    translatedText: str | list[str]  # noqa: N815
    alternatives: list[Any] | None = None


class Health(BaseModel):
    status: Literal["ok", "starting", "draining"]


class Problem(BaseModel):
    error: str


Kind = TypeVar("Kind", bound=BaseModel)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """A body of this kind, or a refusal that says where it is wrong, but not what it says."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Refused(_problem(error, kind)) from None


def validate(kind: type[Kind], fields: dict[str, Any]) -> Kind:
    """The same of a form's fields."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise Refused(_problem(error, kind)) from None


def _problem(error: ValidationError, kind: type[BaseModel]) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in KNOWN)
    words = first["msg"] if first["type"] != "json_invalid" else "the body is not valid JSON"
    if first["type"] == "extra_forbidden":
        close = get_close_matches(str(first["loc"][-1])[:40], kind.model_fields, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        fields = ", ".join(kind.model_fields)
        words = f"there is a field that is unknown here; {guess}there are {fields}"
    return f"{place}: {words}" if place else words


def decoded(image: str) -> bytes:
    """The bytes of an image in base64; a data URL is understood too."""
    if image.startswith("data:"):
        image = image.partition(",")[2]
    try:
        return base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("image: this is not base64") from None


def several(value: "str | list[str]") -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


KNOWN = {
    name
    for kind in (
        TranslateBody,
        GenerateBody,
        LabelBody,
        ClassifyBody,
        ReadBody,
        AttentionBody,
        LibreBody,
    )
    for name in kind.model_fields
}
"""Names of fields; what else stands in a body is the user's, and not repeated."""
