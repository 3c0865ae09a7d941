"""Predictors: their public names, calls, device and printed form."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import Predictor, check, checkpoint, interop, record
from regard.data.tokenizer import Tokenizer
from regard.model.quantized import quantize
from regard.recipes.recipe import files
from regard.service.requests import Translate
from regard.service.service import Service
from regard.task.load import load
from regard.task.predictor import parameter_count
from tests.service import samples

COMMON = {"device", "load", "model", "to"}
SEARCHES = {"search", "tokenizer"}
PUBLIC = {
    "Translator": COMMON
    | SEARCHES
    | {"attention", "ensemble", "find_head", "head", "hypotheses", "score", "source_tokenizer"}
    | {"stream", "tags", "translate", "translations"},
    "Classifier": COMMON | {"classify", "labels", "preparation", "probabilities"},
    "Reader": COMMON | SEARCHES | {"attention", "grid", "preparation", "read"},
    "Labeler": COMMON | {"label", "labels", "probabilities", "tokenizer"},
    "Generator": COMMON | SEARCHES | {"ensemble", "generate"},
    "TextEmbedder": COMMON | {"encode", "fill", "tokenizer"},
}
BUILDERS = {
    "Translator": samples.translator,
    "Classifier": samples.classifier,
    "Reader": samples.reader,
    "Labeler": samples.labeler,
    "Generator": samples.generator,
    "TextEmbedder": samples.embedder,
}
KINDS = sorted(PUBLIC)
TEXT = "ab cd\nefg  hij\n\n klm"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    for name, save in BUILDERS.items():
        save(place / name)
    (place / "picture.png").write_bytes(samples.picture(0))
    return {name: place / name for name in BUILDERS}


@pytest.mark.parametrize("kind", KINDS)
def test_public_attributes(folders: dict[str, Path], kind: str) -> None:
    predictor = load(folders[kind])
    assert type(predictor).__name__ == kind
    assert {name for name in dir(predictor) if not name.startswith("_")} == PUBLIC[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_loads_its_own_kind(folders: dict[str, Path], kind: str) -> None:
    cls: type[Predictor] = getattr(regard, kind)
    other = KINDS[KINDS.index(kind) - 1]
    assert type(cls.load(str(folders[kind]))) is cls
    assert type(Predictor.load(folders[kind])) is cls
    with pytest.raises(ValueError, match=f"{other} holds a {other}, not a {kind}; call [.]"):
        cls.load(folders[other])


@pytest.mark.parametrize(
    ("method", "kind", "inputs"),
    [
        ("translate", "Translator", ["ab"]),
        ("classify", "Classifier", ["picture.png"]),
        ("read", "Reader", ["picture.png"]),
        ("label", "Labeler", ["ab"]),
        ("generate", "Generator", ["ab"]),
        ("encode", "TextEmbedder", ["ab"]),
        ("fill", "TextEmbedder", ["a [MASK]"]),
    ],
)
def test_method_of_another_kind_names_the_right_one(
    folders: dict[str, Path], method: str, kind: str, inputs: list[str]
) -> None:
    for name, folder in folders.items():
        predictor = load(folder)
        if name != kind:
            with pytest.raises(
                ValueError, match=f"holds a {name}, not a {kind}; call [.]"
            ) as error:
                getattr(predictor, method)(inputs)
            called = str(error.value).rpartition(".")[2].partition("(")[0]
            assert called in dir(predictor)


@pytest.mark.parametrize("kind", ["Classifier", "Reader"])
def test_a_single_picture_gives_a_single_result(folders: dict[str, Path], kind: str) -> None:
    from PIL import Image

    predictor: Any = load(folders[kind])
    path = folders[kind].parent / "picture.png"
    (expected,) = predictor([path])
    with Image.open(path) as image:
        for single in (path, str(path), path.read_bytes(), image):
            assert predictor(single) == expected
    pixels = np.zeros((2, 12, 20), np.uint8)
    assert len(predictor(list(pixels))) == 2


@pytest.mark.parametrize("kind", ["Translator", "Labeler", "Generator", "TextEmbedder"])
def test_a_single_text_gives_a_single_result(folders: dict[str, Path], kind: str) -> None:
    predictor: Any = load(folders[kind])
    one, both = predictor("ab cd"), predictor(["ab cd", "efg"])
    assert len(both) == 2
    if kind == "TextEmbedder":
        torch.testing.assert_close(one, both[0])
    else:
        assert one == both[0]
        assert isinstance(one, str)


@pytest.mark.parametrize("kind", KINDS)
def test_repr_names_folder_sizes_and_device(folders: dict[str, Path], kind: str) -> None:
    predictor = load(folders[kind])
    count = sum(parameter.numel() for parameter in predictor.model.parameters())
    for part in (kind, str(folders[kind]), "width 16", f"parameters {count:,}", "device cpu"):
        assert part in repr(predictor)
    assert "\n" not in repr(predictor)
    page: str = predictor._repr_html_()
    assert str(folders[kind]) in page
    if kind in ("Classifier", "Labeler"):
        assert "classes 5 (v, w, x, y, z)" in repr(predictor) or "3 (bad, fair, good)" in page
    else:
        assert f"vocabulary {samples.BPE.size:,}" in repr(predictor)


def test_to_moves_every_model_and_returns_the_predictor(folders: dict[str, Path]) -> None:
    translator = regard.Translator.load(folders["Translator"], folders["Translator"])
    assert translator.to("cpu") is translator
    assert translator.device == torch.device("cpu")
    with pytest.raises(ValueError, match="not one that torch knows"):
        translator.to("gpu")
    assert len(translator._models()) == 2


def test_8_bit_weights_stay_on_the_cpu(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint.load(folders["Translator"])
    count = parameter_count(saved.model)
    quantize(saved.model)
    files = {name: path.read_bytes() for name, path in saved.files.items() if "json" in name}
    regard.save(tmp_path / "small", saved.model, files=files, task=saved.task)
    small = load(tmp_path / "small")
    assert f"parameters {count:,}" in repr(small)
    monkeypatch.setattr("regard.task.predictor.use", torch.device)
    with pytest.raises(ValueError, match="8-bit weights are for the cpu, not for cuda"):
        small.to("cuda")


def test_lines_of_a_text_are_translated_one_by_one(folders: dict[str, Path]) -> None:
    translator = regard.Translator.load(folders["Translator"])
    lines = ["ab cd", "efg  hij", "", "klm"]
    alone = translator.translate(lines)
    expected = "{}\n{}\n\n {}".format(*(text for text in alone if text))
    assert translator.translate([TEXT, "ab cd", "\n"]) == [expected, alone[0], "\n"]
    assert list(translator.stream(iter([TEXT, None, "ab cd"]))) == [expected, alone[0]]
    ((first, second),) = translator.hypotheses([TEXT], n_best=2)
    each = translator.hypotheses([line for line in lines if line], n_best=2)
    assert first.text == expected
    assert first.score == pytest.approx(sum(best[0].score for best in each) / 3)
    assert second.text == "{}\n{}\n\n {}".format(*(best[1].text for best in each))
    assert first.tokens == [token for best in each for token in best[0].tokens]


def test_lines_are_translated_as_the_service_does(folders: dict[str, Path]) -> None:
    texts = [TEXT, "ab cd\r\n", "ab cd", "\n", " ef \x85 g"]
    translator = regard.Translator.load(folders["Translator"])
    with Service() as service:
        service.add(folders["Translator"], "run")
        answers = service.submit(Translate(model="run", texts=tuple(texts), n_best=2)).result(60)
    ours = translator.hypotheses(texts, n_best=2)
    for answer, best in zip(answers, ours, strict=True):
        served = [
            (answer.text, answer.score),
            *((one.text, one.score) for one in answer.alternatives),
        ]
        assert [text for text, _ in served] == [written.text for written in best]
        assert [score for _, score in served] == pytest.approx([w.score for w in best])


def test_prefix_attention_and_alignment_of_several_lines(folders: dict[str, Path]) -> None:
    translator = regard.Translator.load(folders["Translator"])
    translator.find_head(["ab cd efg"])
    options: dict[str, Any] = {"attention": True, "align": True}
    (whole,) = translator.translations(["ab cd\nefg hij"], prefix="tu", **options)
    first, second = translator.translations(["ab cd", "efg hij"], prefix=["tu", ""], **options)
    assert whole[0].text == f"{first[0].text}\n{second[0].text}"
    assert whole[0].text.startswith("tu")
    words = len(first[0].text.split())
    shifted = [(2 + source, words + target) for source, target in second[0].alignment or ()]
    assert whole[0].alignment == [*(first[0].alignment or ()), *shifted]
    assert whole[0].attention is not None
    assert first[0].attention is not None
    assert second[0].attention is not None
    assert whole[0].attention.weights.shape[2] == (
        first[0].attention.weights.shape[2] + second[0].attention.weights.shape[2]
    )


def test_results_print_weights_as_a_shape(folders: dict[str, Path]) -> None:
    translator = regard.Translator.load(folders["Translator"])
    (best,) = translator.translations(["ab cd"], attention=True, align=True)
    attended = best[0].attention
    assert attended is not None
    shape = str(tuple(attended.weights.shape))
    assert shape in repr(attended)
    for text in (repr([best]), repr(attended), repr(translator.find_head(["ab cd efg"]))):
        assert "tensor" not in text
        assert len(text) < 400
    assert repr(best[0].text) in repr(best)
    reader = regard.Reader.load(folders["Reader"])
    looked = reader.attention(folders["Reader"].parent / "picture.png", "ab")
    assert repr(looked) == f"Looked('▁ab</s>', weights {tuple(looked.weights.shape)})"


def test_paths_are_text_or_path_objects(folders: dict[str, Path]) -> None:
    class Place(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(folders["Labeler"])

    assert [type(load(place)).__name__ for place in (Place(), str(folders["Labeler"]))] == [
        "Labeler",
        "Labeler",
    ]


def test_recipes_and_saved_files_take_text_and_path_objects(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    place = folders["Translator"]
    tokenizer = place / "tokenizer.json"
    model = regard.Translator.load(place).model
    for kind in (str, Path):
        folder = kind(tmp_path / "copy")
        regard.save(folder, model, files={"tokenizer.json": kind(tokenizer)})
        assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
        assert files(kind(place), "tokenizer.json") == (str(tokenizer),)
        assert Tokenizer.read(kind(tokenizer)).size == samples.BPE.size
        with pytest.raises(ValueError, match="Regard folder already"):
            interop.detect(kind(place))


@pytest.mark.usefixtures("unchecked")
def test_wrong_texts_and_devices_are_one_line(folders: dict[str, Path]) -> None:
    translator: Any = load(folders["Translator"])
    one_text = "ab cd"
    wrong: Any = "fp16"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: next(translator.stream(one_text)), "not one string; pass [text]"),
        (lambda: translator.translations(one_text), "not one string; pass [text]"),
        (lambda: translator.score([("ab", "cd"), one_text]), "pairs[1] ('ab cd') must be a pair"),
        (lambda: translator.score([("ab",)]), "pairs[0] (('ab',)) must be a pair"),
        (lambda: translator.attention(["ab"], "cd"), "(['ab']) must be a string"),
        (lambda: translator.translate(["ab"], beams=2.5), "beams (2.5) must be a whole"),
        (lambda: translator.to(torch.float16), 'device ("torch.float16") is not'),
        (lambda: load(folders["Translator"], dtype=wrong), "dtype (fp16) must be"),
        (lambda: record(translator).__enter__(), "not Translator; of a predictor record its"),
        (lambda: check(translator), "not Translator; of a predictor pass the folder"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
            call()
        assert message in str(error.value)


def test_auto_is_a_device(folders: dict[str, Path]) -> None:
    expected = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert load(folders["Labeler"], device="auto").device.type == expected.type


def test_checkpoint_is_found_without_an_import(folders: dict[str, Path]) -> None:
    code = "import sys, regard; regard.checkpoint.load(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folders["Translator"])], check=True)


@pytest.mark.parametrize("pixels", [torch.rand(3, 12, 20), np.zeros((12, 20, 3), np.uint8)])
def test_the_pixels_of_one_picture_are_not_taken_for_several(
    folders: dict[str, Path], pixels: Any
) -> None:
    classifier: Any = load(folders["Classifier"])
    for call in (classifier, classifier.classify):
        with pytest.raises(ValueError, match=r"are one picture; pass a list of pictures: \[pict"):
            call(pixels)
        assert len(call([pixels])) == len(call(pixels[None])) == 1
