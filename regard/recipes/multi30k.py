"""Multi30k (Elliott et al. 2016): captions of pictures, 29,000 pairs.

The files of its task 1, raw: train, val, test_2016_flickr, test_2017_flickr and test_2017_mscoco,
each with .en, .de and .fr, from the dataset's own repository.
"""

from dataclasses import replace
from typing import Any

from regard.model.transformer import TransformerShape
from regard.recipes.recipe import Folder, Recipe, files
from regard.task import translate
from regard.task.spec import Evaluation
from regard.train.config import TrainingConfig

TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


def _corpus(data: Folder, source: str, target: str) -> dict[str, Any]:
    names = {"source": "train", "valid_source": "val"}
    return {
        **{key: files(data, f"{name}.{source}") for key, name in names.items()},
        **{
            key.replace("source", "target"): files(data, f"{name}.{target}")
            for key, name in names.items()
        },
    }


def _tests(data: Folder, source: str, target: str) -> dict[str, dict[str, Any]]:
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


def _recipe(data: Folder, source: str, target: str, config: translate.Config) -> Recipe:
    """The test sets as sacreBLEU scores them, cased and lowercased."""
    tests = _tests(data, source, target)
    return Recipe("translate", config, tests, {"lowercased": _lowercased})


def _muon(steps: int, warmup: int) -> TrainingConfig:
    return TrainingConfig(
        steps=steps,
        batch=16_384,
        optimizer="muon",
        lr=1e-2,
        schedule="cosine",
        warmup=warmup,
        evaluate_every=500,
        save_every=1000,
        ema=0.999,
    )


def en_de(data: Folder) -> Recipe:
    """Multi30k, English to German: the size of Wu et al.'s Transformer-Tiny (2021).

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .de).
    Settings: the paper's 4 + 4 layers of width 128, shared embeddings, 10,000 BPE, label smoothing
    0.1, beams of 5; pre-norm, rotary positions, dropout 0.2, R-Drop with weight 5, Muon, 3,500
    updates, a moving average of the weights.
    Published: 41.02 BLEU on test 2016, tokenised and lowercased.
    Reached: 42.24, lowercased (mean of three seeds); two minutes of an H200 that others share.
    """
    config = translate.Config(
        **_corpus(data, "en", "de"),
        judged=1014,
        vocabulary=10_000,
        beams=5,
        r_drop=5.0,
        model=TransformerShape(
            width=128,
            heads=4,
            feed_forward=256,
            encoder_layers=4,
            decoder_layers=4,
            norm="pre",
            position="rotary",
            dropout=0.2,
            share="all",
        ),
        training=_muon(steps=3500, warmup=400),
    )
    return _recipe(data, "en", "de", config)


def en_de_minute(data: Folder) -> Recipe:
    """Multi30k, English to German, in a minute of one GPU, from the command to the scores.

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .de).
    Settings: 3 + 3 layers of width 256, pre-norm, rotary positions, 8,000 BPE, R-Drop with weight
    5, dropout 0.3, label smoothing 0.1, Muon, 2,000 updates, a moving average of the weights, beams
    of 5.
    Published: 41.02 BLEU on test 2016, tokenised and lowercased, by a smaller model (Wu et al.
    2021).
    Reached: 42.39, lowercased (mean of three seeds), in 42 to 49 s of one H200.
    """
    preset = translate.preset("tiny")
    config = translate.Config(
        **_corpus(data, "en", "de"),
        judged=1014,
        beams=5,
        r_drop=5.0,
        model=replace(preset.model, dropout=0.3),
        training=replace(_muon(steps=2000, warmup=200), evaluate_every=1000),
    )
    return _recipe(data, "en", "de", config)


def _own(data: Folder, source: str, target: str) -> Recipe:
    config = translate.Config(
        **_corpus(data, source, target),
        judged=1014,
        beams=5,
        r_drop=5.0,
        model=replace(
            translate.preset("tiny").model, encoder_layers=6, decoder_layers=6, dropout=0.4
        ),
        training=_muon(steps=3000, warmup=300),
    )
    return _recipe(data, source, target, config)


def en_de_own(data: Folder) -> Recipe:
    """Multi30k, English to German: wider and deeper, regularized by R-Drop.

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .de).
    Settings: 6 + 6 layers of width 256, pre-norm, rotary positions, 8,000 BPE, R-Drop with weight
    5, dropout 0.4, label smoothing 0.1, Muon, 3,000 updates, a moving average of the weights, beams
    of 5.
    Reached: 42.75 BLEU on test 2016, lowercased (mean of three seeds); five minutes of an H200 that
    others share.
    """
    return _own(data, "en", "de")


def en_fr(data: Folder) -> Recipe:
    """Multi30k, English to French, with our settings of English to German.

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .fr).
    Reached: 63.5 BLEU on test 2016, cased (mean of three seeds); two and a half minutes of an H200
    that others share.
    """
    return _own(data, "en", "fr")


def en_de_cpu(data: Folder) -> Recipe:
    """Multi30k, English to German, in 20 minutes on two cores.

    Data: the folder of Multi30k's task 1 (train, val and the three tests, .en and .de).
    Settings: 3 + 3 layers of width 192, pre-norm, rotary positions, 6,000 BPE, dropout 0.05, Muon,
    a cosine schedule that ends with the minutes, a moving average of the weights, beams of 5; in
    bfloat16 where the processor has instructions for it.
    Reached: 38.99 BLEU on test 2016, cased (mean of three seeds).
    """
    preset = translate.preset("tiny")
    config = replace(
        preset,
        **_corpus(data, "en", "de"),
        beams=5,
        vocabulary=6000,
        model=replace(preset.model, width=192, heads=3, feed_forward=768, dropout=0.05),
        training=replace(
            preset.training,
            minutes=20.0,
            batch=4096,
            optimizer="muon",
            lr=1e-2,
            schedule="cosine",
            warmup=100,
            device="cpu",
        ),
    )
    return _recipe(data, "en", "de", config)
