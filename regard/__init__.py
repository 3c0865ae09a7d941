"""Regard: to look at with attention. The Transformer, complete, fast and see-through.

The names below are the public face. Each is imported from its module when it is first used, so
that `import regard` costs nothing and a command that needs no tensors never waits for torch.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "AudioSource",
    "ClassifierConfig",
    "Concatenated",
    "CrossCache",
    "Dot",
    "EncoderConfig",
    "General",
    "Grid",
    "ImageSource",
    "LanguageConfig",
    "LanguageModel",
    "Learned",
    "LearnedGrid",
    "LinearBias",
    "Mask",
    "MultiHeadAttention",
    "Packed",
    "Rotary",
    "ScaledDot",
    "Score",
    "SelfCache",
    "Sinusoidal",
    "Statistics",
    "TextClassifier",
    "TextEncoder",
    "TextSource",
    "Transformer",
    "TransformerConfig",
    "VisionConfig",
    "VisionTransformer",
    "__version__",
    "attend",
    "causal",
    "documents",
    "explain",
    "load",
    "packed",
    "padding",
    "prefix",
    "scaled_dot_product_attention",
    "statistics",
    "weights",
    "window",
]

if TYPE_CHECKING:
    from regard.attention.attend import attend, explain
    from regard.attention.cache import CrossCache, SelfCache
    from regard.attention.functional import scaled_dot_product_attention
    from regard.attention.mask import (
        Mask,
        Packed,
        causal,
        documents,
        packed,
        padding,
        prefix,
        window,
    )
    from regard.attention.multihead import MultiHeadAttention
    from regard.attention.position import (
        Concatenated,
        Grid,
        Learned,
        LearnedGrid,
        LinearBias,
        Rotary,
        Sinusoidal,
    )
    from regard.attention.score import Additive, Dot, General, ScaledDot, Score
    from regard.attention.weights import Statistics, statistics, weights
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
    from regard.task.load import load
else:
    # Out of a type checker's sight, which would otherwise believe in any name at all.
    import sys
    from importlib import import_module

    _HOMES = {
        "regard.attention.attend": "attend explain",
        "regard.attention.cache": "CrossCache SelfCache",
        "regard.attention.functional": "scaled_dot_product_attention",
        "regard.attention.mask": "Mask Packed causal documents packed padding prefix window",
        "regard.attention.multihead": "MultiHeadAttention",
        "regard.attention.position": "Concatenated Grid Learned LearnedGrid LinearBias Rotary "
        "Sinusoidal",
        "regard.attention.score": "Additive Dot General ScaledDot Score",
        "regard.attention.weights": "Statistics statistics weights",
        "regard.model.classifier": "ClassifierConfig TextClassifier",
        "regard.model.encoder": "EncoderConfig TextEncoder",
        "regard.model.language": "LanguageConfig LanguageModel",
        "regard.model.transformer": "AudioSource ImageSource TextSource Transformer "
        "TransformerConfig",
        "regard.model.vit": "VisionConfig VisionTransformer",
        "regard.task.load": "load",
    }

    def __getattr__(name):
        for home, names in _HOMES.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(home), name)
                return value
        regard = sys.modules[__name__]
        raise AttributeError(f"module 'regard' has no attribute {name!r}", name=name, obj=regard)

    def __dir__():
        return sorted({*globals(), *__all__})
