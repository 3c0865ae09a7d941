"""Regard: to look at with attention. A library for training, running and inspecting Transformers.

`regard.__all__` lists the public interface. Each name is imported from its module at its first use,
so that `import regard` imports nothing else, and a command that needs no tensors does not import
torch. Docstrings name the axes of tensors by one legend:

    B  batch                           C  channels of an image
    L  query or target length          Y  rows of an image
    S  key or source length            X  columns of an image
    D  width of the model              T  tokens of a packed batch
    H  heads                           W  beams
    G  heads of keys and values        R  selected rows
    K  width of a query or key         P  positions
    V  width of a value                J  width of a key where it differs from K
    F  features, hidden width          E  width of a source where it differs from D
    N  vocabulary or classes           ...  any leading axes
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AdditiveScore",
    "AlignmentScore",
    "AttentionStatistics",
    "AudioSource",
    "BilinearScore",
    "Classifier",
    "ClassifierConfig",
    "Concatenated",
    "CrossCache",
    "DotScore",
    "EncoderConfig",
    "Generator",
    "GridPositions",
    "ImageSource",
    "Labeler",
    "LanguageConfig",
    "LanguageModel",
    "LearnedGridPositions",
    "LearnedPositions",
    "Mask",
    "MultiHeadAttention",
    "PackedLengths",
    "Predictor",
    "Reader",
    "RotaryEmbedding",
    "ScaledDotScore",
    "SelfCache",
    "SinusoidalPositions",
    "Supervised",
    "TextClassifier",
    "TextEmbedder",
    "TextEncoder",
    "TextSource",
    "TrainingConfig",
    "Transformer",
    "TransformerConfig",
    "Translator",
    "VisionConfig",
    "VisionTransformer",
    "__version__",
    "attend",
    "attention_statistics",
    "attention_weights",
    "causal",
    "check",
    "documents",
    "explain_attention",
    "fit",
    "from_torch",
    "load",
    "masks",
    "padding",
    "prefix",
    "record",
    "save",
    "scaled_dot_product_attention",
    "window",
]

if TYPE_CHECKING:
    from regard import checkpoint as checkpoint
    from regard import masks
    from regard.attention.attend import attend, explain_attention
    from regard.attention.attend import explain_attention as explain
    from regard.attention.cache import CrossCache, SelfCache
    from regard.attention.functional import from_torch, scaled_dot_product_attention
    from regard.attention.mask import Mask, causal, documents, padding, prefix, window
    from regard.attention.mask import packed as packed
    from regard.attention.multihead import MultiHeadAttention
    from regard.attention.packed import PackedLengths
    from regard.attention.position import (
        ALiBi,
        Concatenated,
        GridPositions,
        LearnedGridPositions,
        LearnedPositions,
        RotaryEmbedding,
        SinusoidalPositions,
    )
    from regard.attention.score import (
        AdditiveScore,
        AlignmentScore,
        BilinearScore,
        DotScore,
        ScaledDotScore,
    )
    from regard.attention.weights import (
        AttentionStatistics,
        attention_statistics,
        attention_weights,
    )
    from regard.attention.weights import attention_statistics as statistics
    from regard.attention.weights import attention_weights as weights
    from regard.checkpoint import save
    from regard.checks.contract import check
    from regard.look.record import record
    from regard.model.classifier import ClassifierConfig, TextClassifier
    from regard.model.encoder import EncoderConfig, TextEncoder
    from regard.model.language import LanguageConfig, LanguageModel
    from regard.model.transformer import (
        AudioSource,
        ImageSource,
        TextSource,
        Transformer,
        TransformerConfig,
    )
    from regard.model.vit import VisionConfig, VisionTransformer
    from regard.task.classify import Classifier
    from regard.task.encoder import TextEmbedder
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.load import load
    from regard.task.predictor import Predictor
    from regard.task.read import Reader
    from regard.task.translator import Translator
    from regard.train.config import TrainingConfig
    from regard.train.fit import fit
    from regard.train.supervised import Supervised

    Additive = AdditiveScore
    Dot = DotScore
    General = BilinearScore
    Learned = LearnedPositions
    Packed = PackedLengths
    Rotary = RotaryEmbedding
    ScaledDot = ScaledDotScore
    Score = AlignmentScore
    Sinusoidal = SinusoidalPositions

    __all__ += ["explain", "statistics", "weights"]  # exported, for type checkers
else:
    # Hidden from type checkers, which would otherwise accept any name at all.
    import sys
    from importlib import import_module

    _MODULES = {
        "regard.attention.attend": "attend explain_attention",
        "regard.attention.cache": "CrossCache SelfCache",
        "regard.attention.functional": "from_torch scaled_dot_product_attention",
        "regard.attention.mask": "Mask causal documents padding prefix window",
        "regard.attention.multihead": "MultiHeadAttention",
        "regard.attention.packed": "PackedLengths",
        "regard.attention.position": "ALiBi Concatenated GridPositions LearnedGridPositions "
        "LearnedPositions RotaryEmbedding SinusoidalPositions",
        "regard.attention.score": "AdditiveScore AlignmentScore BilinearScore DotScore "
        "ScaledDotScore",
        "regard.attention.weights": "AttentionStatistics attention_statistics attention_weights",
        "regard.checkpoint": "save",
        "regard.checks.contract": "check",
        "regard.look.record": "record",
        "regard.model.classifier": "ClassifierConfig TextClassifier",
        "regard.model.encoder": "EncoderConfig TextEncoder",
        "regard.model.language": "LanguageConfig LanguageModel",
        "regard.model.transformer": "AudioSource ImageSource TextSource Transformer "
        "TransformerConfig",
        "regard.model.vit": "VisionConfig VisionTransformer",
        "regard.task.classify": "Classifier",
        "regard.task.encoder": "TextEmbedder",
        "regard.task.label": "Labeler",
        "regard.task.language": "Generator",
        "regard.task.load": "load",
        "regard.task.predictor": "Predictor",
        "regard.task.read": "Reader",
        "regard.task.translator": "Translator",
        "regard.train.config": "TrainingConfig",
        "regard.train.fit": "fit",
        "regard.train.supervised": "Supervised",
    }
    _OTHER_NAMES = {
        "Additive": "AdditiveScore",
        "Dot": "DotScore",
        "General": "BilinearScore",
        "Learned": "LearnedPositions",
        "Packed": "PackedLengths",
        "Rotary": "RotaryEmbedding",
        "ScaledDot": "ScaledDotScore",
        "Score": "AlignmentScore",
        "Sinusoidal": "SinusoidalPositions",
        "explain": "explain_attention",
        "statistics": "attention_statistics",
        "weights": "attention_weights",
    }
    """Short names that are not in `__all__`: a star import would hide the standard library's."""

    def __getattr__(name):
        public = _OTHER_NAMES.get(name, name)
        for module, names in _MODULES.items():
            if public in names.split():
                value = globals()[name] = getattr(import_module(module), public)
                return value
        if name in ("checkpoint", "masks"):
            return import_module(f"regard.{name}")
        if name == "packed":
            return import_module("regard.masks").packed
        regard = sys.modules[__name__]
        raise AttributeError(f"module 'regard' has no attribute {name!r}", name=name, obj=regard)

    def __dir__():
        return __all__
