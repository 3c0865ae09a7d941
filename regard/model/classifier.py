"""A text classifier: an encoder, and a linear head on the mean of its output.

    memory = encoder(embed(tokens))         the Transformer's own encoder, block by block
    logits = head(mean_n memory_n)          or of the last token's vector alone

`TextClassifier.of(model, classes)` takes the encoder of a trained Transformer, or one that was
trained on text alone, for transfer learning: frozen, or fine-tuned.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.checks import check_integer, integer_tensor
from regard.attention.mask import PackedLengths
from regard.attention.state import LoadableModule, typed_as
from regard.model import build, init
from regard.model.build import MakeAttention, MakeFeedForward, MakePosition
from regard.model.embedding import Tokens
from regard.model.encoder import (
    EncoderConfig,
    EncoderShape,
    TextEncoder,
    embedding_and_encoder,
    features,
)
from regard.model.lengths import Lengths, lengths_after
from regard.model.notebook import model_html
from regard.model.stack import Stack
from regard.model.transformer import TextSource, Transformer
from regard.synonyms import suggest_names

TextPool: TypeAlias = Literal["mean", "last"]


@dataclass(frozen=True, kw_only=True)
class ClassifierShape(EncoderShape):
    """Hyperparameters that do not depend on the texts."""

    pool: TextPool = "mean"
    """Pooling: the mean over the tokens, or the last token."""


@suggest_names
@dataclass(frozen=True)
class ClassifierConfig(ClassifierShape):
    """The whole config of a text classifier.

    >>> from regard import ClassifierConfig, TextClassifier
    >>> config = ClassifierConfig.tiny(classes=3, vocabulary=1000, pool="last")
    >>> TextClassifier(config).head
    Linear(in_features=128, out_features=3, bias=True)
    """

    classes: int
    """Number of classes."""
    vocabulary: int
    """Vocabulary size."""

    @classmethod
    def tiny(cls, classes: int, vocabulary: int, **overrides: Any) -> "ClassifierConfig":
        """Returns a config of two layers of width 128, for experiments."""
        return replace(
            cls(classes, vocabulary, width=128, heads=4, feed_forward=256, layers=2), **overrides
        )


@suggest_names
class TextClassifier(LoadableModule):
    """A classifier of texts: an encoder, and a linear head on the mean of its output.

        logits = W mean_n encoder(embed(tokens))_n        pool="last": of the last token instead

    Shapes: tokens (B, S) → logits (B, N). Custom parts are passed as functions, as to
    `Transformer`. `TextClassifier.of(model, classes)` starts from a trained model.

    >>> import torch
    >>> from regard import TextClassifier
    >>> model = TextClassifier.tiny(classes=3, vocabulary=1000)
    >>> tokens = torch.tensor([[5, 6, 7, 8], [9, 8, 0, 0]])  # a padded batch
    >>> model(tokens, lengths=[4, 2]).shape, model.represent(tokens, lengths=[4, 2]).shape
    (torch.Size([2, 3]), torch.Size([2, 128]))
    >>> other = model.replace_head(5)  # a copy
    >>> sum(p.numel() for p in other.freeze_backbone().parameters() if p.requires_grad)
    645
    """

    def __init__(
        self,
        config: ClassifierConfig,
        *,
        position: MakePosition | None = None,
        attention: MakeAttention | None = None,
        feed_forward: MakeFeedForward | None = None,
    ):
        super().__init__()
        custom = build.check(
            config,
            ClassifierConfig,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        check_integer("classes", config.classes)
        if config.pool not in get_args(TextPool):
            names = ", ".join(get_args(TextPool))
            raise ValueError(f"pool ({config.pool!r}) is unknown; choose from {names}")
        self.config = config
        self.tokens, self.encoder = embedding_and_encoder(
            config,
            config.vocabulary,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.head = nn.Linear(config.width, config.classes)
        init.transformer(self, custom)
        init.classifier(self.head)

    @classmethod
    def tiny(cls, classes: int, vocabulary: int, **overrides: Any) -> "TextClassifier":
        """Returns a classifier of two layers of width 128, for experiments."""
        return cls(ClassifierConfig.tiny(classes, vocabulary, **overrides))

    @classmethod
    def of(cls, model: "Transformer | TextEncoder", classes: int) -> "TextClassifier":
        """Returns a classifier with copies of a text model's embedding and encoder.

        The model is a `TextEncoder`, or a `Transformer` whose source is text.

        >>> from regard import TextClassifier, Transformer
        >>> translator = Transformer.tiny(1000)
        >>> classifier = TextClassifier.of(translator, classes=3)
        >>> classifier.config.layers, classifier.config.width
        (4, 128)
        """
        source = model.config
        if isinstance(source, EncoderConfig):
            vocabulary, layers, embedding = source.vocabulary, source.layers, model.tokens
        elif isinstance(source.source, TextSource):
            vocabulary = source.source.vocabulary or source.vocabulary
            layers, embedding = source.encoder_layers, model.source
        else:
            raise ValueError(
                f"the Transformer's source is {source.source.kind}; use one whose source is text"
            )
        same = {field.name for field in fields(EncoderShape)} - {"layers"}
        shape = {name: value for name, value in asdict(source).items() if name in same}
        config = ClassifierConfig(classes, vocabulary, layers=layers, **shape)
        with torch.device("meta"):
            classifier = cls(config)
        tokens, encoder = copy.deepcopy((embedding, model.encoder))
        assert isinstance(tokens, Tokens)
        assert isinstance(encoder, Stack)
        classifier.tokens, classifier.encoder = tokens, encoder
        table = tokens.table.weight
        classifier.head = nn.Linear(source.width, classes, device=table.device, dtype=table.dtype)
        init.classifier(classifier.head)
        return classifier

    def _repr_html_(self) -> str:
        return model_html(self)

    def forward(
        self, tokens: Int[Tensor, "B S"], *, lengths: Lengths = None
    ) -> Float[Tensor, "T N"]:
        """Returns the logits of each text: tokens (B, S) → (B, N).

        `lengths` (B,) are those of a padded batch; packed tokens are (1, T) with `PackedLengths`.
        """
        return self.head(self.represent(tokens, lengths=lengths))

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> None: ...

    def represent(
        self, tokens: Int[Tensor, "B S"], *, lengths: Lengths = None
    ) -> Float[Tensor, "T D"]:
        """Returns the pooled features of each text, which the head reads: (B, S) → (B, D)."""
        memory = self.features(tokens, lengths=lengths)
        lengths = lengths_after(self.encoder, lengths_after(self.tokens, lengths))
        pool = mean_pool if self.config.pool == "mean" else last_token
        return pool(memory, lengths)

    def features(
        self, tokens: Int[Tensor, "B S"], *, lengths: Lengths = None
    ) -> Float[Tensor, "B R D"]:
        """Returns the last hidden states of all tokens: (B, S) → (B, S, D)."""
        return features(self.tokens, self.encoder, tokens, lengths, self.config.window)

    def replace_head(self, classes: int) -> "TextClassifier":
        """Returns a copy with a new, untrained head, for other labels."""
        check_integer("classes", classes)
        model = copy.deepcopy(self)
        model.config = replace(self.config, classes=classes)
        old = self.head.weight
        model.head = nn.Linear(self.config.width, classes, device=old.device, dtype=old.dtype)
        init.classifier(model.head)
        return model

    def freeze_backbone(self) -> "TextClassifier":
        """Freezes all but the head, in place, and returns the model.

        The backbone keeps its weights, as after `requires_grad_(False)`; the head is trained.
        """
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for parameter in self.head.parameters():
            parameter.requires_grad_(True)
        return self


def mean_pool(memory: Float[Tensor, "B S D"], lengths: Lengths) -> Float[Tensor, "T D"]:
    """Mean pooling over each text's own tokens; zero for an empty text."""
    if lengths is None:
        return memory.mean(1) if memory.shape[1] else memory.sum(1)
    if isinstance(lengths, PackedLengths):
        packed = lengths.to(memory.device)
        sums = memory.new_zeros(len(packed), memory.shape[-1])
        sums = sums.index_add(0, packed.sequence(), memory[0])
        return sums / packed.offsets.diff().clamp(min=1)[:, None].to(sums.dtype)
    counts = _counts(lengths, memory)
    real = torch.arange(memory.shape[1], device=memory.device) < counts[:, None]
    sums = memory.masked_fill(~real[:, :, None], 0.0).sum(1)
    return sums / counts.clamp(min=1)[:, None].to(sums.dtype)


def last_token(memory: Float[Tensor, "B S D"], lengths: Lengths) -> Float[Tensor, "T D"]:
    """The vector of each text's last token; zero for an empty text."""
    if memory.shape[1] == 0:  # no text has a token
        texts = len(lengths) if isinstance(lengths, PackedLengths) else len(memory)
        return memory.new_zeros(texts, memory.shape[2])
    if lengths is None:
        return memory[:, -1]
    if isinstance(lengths, PackedLengths):
        ends = lengths.to(memory.device).offsets.long()
        last, counts = memory[0, (ends[1:] - 1).clamp(min=0)], ends.diff()
    else:
        counts = _counts(lengths, memory)
        rows = torch.arange(len(memory), device=memory.device)
        last = memory[rows, (counts - 1).clamp(min=0)]
    return last.masked_fill((counts == 0)[:, None], 0.0)


def _counts(lengths: Tensor | Sequence[int], memory: Tensor) -> Tensor:
    return integer_tensor(lengths, "lengths").to(memory.device).long()
