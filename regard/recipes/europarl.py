"""Europarl (Koehn 2005): speeches of the European Parliament.

Files train, valid and test, each with .en and .de, line by line: any split of one's own. For the
out-of-domain check newstest2014.ende.en and .de of WMT 2014 lie in the same folder, or in newstest
beside it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.model.language import LanguageShape
from regard.recipes.recipe import Folder, Recipe, files
from regard.task import language, translate
from regard.train.config import TrainingConfig


def _news(data: Folder, source: str, target: str) -> dict[str, dict[str, Any]]:
    for folder in (Path(data), Path(data).parent / "newstest"):
        try:
            return {
                "newstest2014": {
                    "source": files(folder, f"newstest2014.ende.{source}"),
                    "target": files(folder, f"newstest2014.ende.{target}"),
                }
            }
        except ValueError:
            continue
    return {}


def _translation(data: Folder, source: str, target: str) -> Recipe:
    preset = translate.preset("base")
    config = replace(
        preset,
        source=files(data, f"train.{source}"),
        target=files(data, f"train.{target}"),
        valid_source=files(data, f"valid.{source}"),
        valid_target=files(data, f"valid.{target}"),
        judged=1000,
        vocabulary=16_000,
        # After so few updates a post-norm model would not have learned where to look.
        model=replace(preset.model, norm="pre", position="rotary", dropout=0.2),
        training=TrainingConfig(
            steps=2500,
            batch=50_000,
            optimizer="muon",
            lr=5e-3,
            schedule="cosine",
            warmup=250,
            evaluate_every=500,
            save_every=1250,
            ema=0.999,
        ),
    )
    test = {"source": files(data, f"test.{source}"), "target": files(data, f"test.{target}")}
    return Recipe("translate", config, {"test": test, **_news(data, source, target)})


def en_de(data: Folder) -> Recipe:
    """Europarl, English to German: the base Transformer on 160,000 pairs.

    Data: a folder with train, valid and test, .en and .de; newstest2014 is scored where it is.
    Settings: 6 + 6 layers of width 512, pre-norm, rotary positions, 16,000 BPE, dropout 0.2, label
    smoothing 0.1, Muon, 2,500 updates of 50,000 tokens, a moving average of the weights.
    Reached: 22.4 BLEU on a test set of our own split, 14.2 on newstest2014 (mean of three seeds);
    six minutes of an H200 that two others share.
    """
    return _translation(data, "en", "de")


def de_en(data: Folder) -> Recipe:
    """Europarl, German to English: the base Transformer on 160,000 pairs.

    Data: a folder with train, valid and test, .en and .de; newstest2014 is scored where it is.
    Settings: those of europarl-en-de.
    Reached: 28.2 BLEU on a test set of our own split, 17.3 on newstest2014 (mean of three seeds);
    five minutes of an H200 that two others share.
    """
    return _translation(data, "de", "en")


def english(data: Folder) -> Recipe:
    """Europarl, English: a language model, in bits per byte.

    Data: a folder with train.en, valid.en and test.en.
    Settings: 6 layers of width 384, 8,000 BPE, a context of 256 tokens, dropout 0.2, Muon, 1,000
    updates of 65,536 tokens, a moving average of the weights.
    Reached: 1.067 bits per byte of test.en (mean of three seeds); two minutes of an H200 that
    others share.
    """
    config = language.Config(
        text=files(data, "train.en"),
        valid=files(data, "valid.en"),
        vocabulary=8000,
        model=LanguageShape(width=384, heads=6, feed_forward=1024, layers=6, dropout=0.2),
        training=TrainingConfig(
            steps=1000,
            batch=65_536,
            optimizer="muon",
            lr=5e-3,
            schedule="cosine",
            warmup=100,
            weight_decay=0.1,
            smoothing=0.0,
            evaluate_every=200,
            save_every=500,
            ema=0.998,
        ),
    )
    return Recipe("language", config, {"test": {"texts": files(data, "test.en")}})
