"""Multi30k (Elliott et al. 2016): captions of pictures, 29,000 pairs.

The files of its task 1, raw: train, val, test_2016_flickr, test_2017_flickr and test_2017_mscoco,
each with .en, .de and .fr, from the dataset's own repository.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.model.transformer import TransformerShape
from regard.recipes.recipe import Recipe, files
from regard.task import translate
from regard.task.spec import Evaluation
from regard.train.config import TrainingConfig

TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


def _corpus(data: Path, source: str, target: str) -> dict[str, Any]:
    names = {"source": "train", "valid_source": "val"}
    return {
        **{key: files(data, f"{name}.{source}") for key, name in names.items()},
        **{
            key.replace("source", "target"): files(data, f"{name}.{target}")
            for key, name in names.items()
        },
    }


def _tests(data: Path, source: str, target: str) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "source": files(data, f"{name}.{source}"),
            "target": files(data, f"{name}.{target}"),
        }
        for name in TESTS
    }


def _lowercased(found: translate.Translations) -> Evaluation:
    """As Wu et al. score, but with sacreBLEU's own tokenizer."""
    quality = translate.Quality(lowercase=True)
    return Evaluation(quality(found.translations, *found.references), quality.signatures)


def _recipe(data: Path, source: str, target: str, config: translate.Config) -> Recipe:
    """The test sets as sacreBLEU scores them, cased and lowercased."""
    tests = _tests(data, source, target)
    return Recipe("translate", config, tests, {"lowercased": _lowercased})


def _paper(data: Path, source: str, target: str) -> Recipe:
    config = translate.Config(
        **_corpus(data, source, target),
        judged=1014,
        vocabulary=10_000,
        beams=5,
        model=TransformerShape(
            width=128,
            heads=4,
            feed_forward=256,
            encoder_layers=4,
            decoder_layers=4,
            dropout=0.3,
            share="all",
        ),
        training=TrainingConfig(
            steps=8000,
            batch=16_384,
            lr=5e-3,
            schedule="inverse_sqrt",
            warmup=2000,
            weight_decay=0.0,
            clip=None,
            evaluate_every=100,
            save_every=1000,
            average=10,
        ),
    )
    return _recipe(data, source, target, config)


def en_de(data: Path) -> Recipe:
    """Multi30k, English to German: the Transformer-Tiny of Wu et al. (2021).

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .de).
    Settings: the paper's: 4 + 4 layers, width 128, shared embeddings, 10,000 BPE, dropout 0.3,
    label smoothing 0.1, 8,000 updates, the last ten evaluations averaged, beams of 5.
    Published: 41.02 BLEU on test 2016, tokenised and lowercased.
    """
    return _paper(data, "en", "de")


def en_fr(data: Path) -> Recipe:
    """Multi30k, English to French, with the settings of English to German.

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .fr).
    """
    return _paper(data, "en", "fr")


def en_de_own(data: Path) -> Recipe:
    """Multi30k, English to German: regularized by R-Drop, in a wider model.

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .de).
    Settings: width 256 and 3 + 3 layers, pre-norm, rotary positions, R-Drop with weight 5, dropout
    0.3, a moving average of the weights, beams of 5.
    """
    config = translate.Config(
        **_corpus(data, "en", "de"),
        judged=1014,
        beams=5,
        r_drop=5.0,
        model=replace(translate.preset("tiny").model, dropout=0.3),
        training=TrainingConfig(
            steps=6000,
            batch=16_384,
            lr=3e-3,
            schedule="cosine",
            warmup=1000,
            evaluate_every=250,
            save_every=1000,
            ema=0.999,
        ),
    )
    return _recipe(data, "en", "de", config)


def en_de_cpu(data: Path) -> Recipe:
    """Multi30k, English to German, in 20 minutes on two cores.

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .de).
    Settings: the tiny preset with a cosine schedule, which ends when the minutes do.
    """
    preset = translate.preset("tiny")
    training = replace(preset.training, minutes=20.0, schedule="cosine", evaluate_every=500)
    config = replace(preset, **_corpus(data, "en", "de"), beams=5, training=training)
    return _recipe(data, "en", "de", config)
