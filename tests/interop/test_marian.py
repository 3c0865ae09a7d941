"""Marian's translators: the same logits as Hugging Face's own model, read and written back."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard import (
    AudioSource,
    LanguageConfig,
    LanguageModel,
    TextSource,
    Transformer,
    checkpoint,
    load,
)
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import SinusoidalPositions
from regard.data.tokenizer import Tokenizer
from regard.data.tokenizer import files as tokenizer_files
from regard.interop import marian, read, shape_for, write
from regard.model.formula import parameters
from regard.model.transformer import TransformerConfig
from regard.task.search import SearchSettings
from regard.task.translate import preset

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 47,
    "d_model": 33,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 29,
    "max_position_embeddings": 31,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": 43,
    "decoder_start_token_id": 43,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}
APART = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53}
TASK = {"start": 5, "end": 3, "pad": 5}

ours = TransformerConfig(
    47,
    width=33,
    heads=3,
    feed_forward=29,
    encoder_layers=2,
    decoder_layers=3,
    activation="silu",
    position="sinusoidal-halves",
    length=31,
)


def peer(**changes: Any) -> Any:
    """Their model with every number random: biases and norms too, which start at 0 and 1."""
    model = transformers.MarianMTModel(transformers.MarianConfig(**SIZES | changes)).eval()
    _randomise(model)
    model.final_logits_bias.normal_()
    return model


def _randomise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:  # their sinusoids do not
            nn.init.normal_(parameter, std=0.3)


def saved(folder: Path, **changes: Any) -> Any:
    model = peer(**changes)
    model.save_pretrained(folder)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randint(47, (5, 13)),
        torch.randint(47, (5, 11)),
        torch.tensor([13, 1, 7, 5, 11]),
    )


def same(theirs: Any, ours: nn.Module, tolerance: float = 1e-5) -> None:
    """Equal logits, with filling in the source."""
    source, target, lengths = batch()
    mask = (torch.arange(13) < lengths[:, None]).long()
    with torch.no_grad():
        expected = theirs(source, attention_mask=mask, decoder_input_ids=target).logits
        got = ours(source, target, source_lengths=lengths)
        unmasked = ours(source, target)
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()
    assert (unmasked - expected).abs().max() > 100 * tolerance  # the filling would matter


# Reading


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, "all"),
        (APART, "target"),
        (APART | {"tie_word_embeddings": False}, "none"),
        ({"tie_word_embeddings": False}, "none"),
        ({"activation_function": "relu", "scale_embedding": False}, "all"),
        ({"decoder_ffn_dim": 17, "encoder_layers": 3, "decoder_layers": 1}, "all"),
        ({"activation_function": "gelu", "d_model": 34, "encoder_attention_heads": 2}, "all"),
    ],
)
def test_logits_are_theirs(tmp_path: Path, changes: dict[str, Any], share: str) -> None:
    if "encoder_attention_heads" in changes:
        changes = changes | {"decoder_attention_heads": changes["encoder_attention_heads"]}
    theirs = saved(tmp_path, **changes)
    imported = read(tmp_path)
    assert isinstance(imported.model, Transformer)
    assert imported.model.config.share == share
    assert parameters(imported.model.config) == sum(p.numel() for p in imported.model.parameters())
    assert not imported.model.training
    same(theirs, imported.model)
    same(theirs.double(), imported.model.double(), 1e-7)  # their sinusoids are single


def test_an_untied_output_leaves_both_tables_apart(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=False)
    model = read(tmp_path).model
    tables = [model.source.table.weight, model.target.table.weight, model.output.weight]
    assert len({id(table) for table in tables}) == 3


def test_one_table_stays_one(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    model = read(tmp_path).model
    assert model.source.table.weight is model.target.table.weight is model.output.weight
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(p.numel() for p in theirs.parameters() if p.requires_grad) + 47
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("width", [33, 34])
def test_their_sinusoids_are_ours_in_halves(width: int) -> None:
    theirs = peer(d_model=width, encoder_attention_heads=1, decoder_attention_heads=1)
    table = theirs.model.encoder.embed_positions.weight
    expected = SinusoidalPositions(width, layout="halves").encoding(torch.arange(31), torch.float32)
    assert table.allclose(expected, rtol=0, atol=1e-7)


def test_half_precision_stays(tmp_path: Path) -> None:
    peer().to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in read(tmp_path).model.parameters()} == {torch.bfloat16}


def test_a_missing_bias_of_logits_is_none(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("final_logits_bias"))
    model = read(tmp_path).model
    assert model.output.bias is None
    theirs.final_logits_bias.zero_()
    same(theirs, model)


def test_old_files_hold_everything_several_times(tmp_path: Path) -> None:
    """As the published OPUS-MT folders: a .bin with every alias, and with the sinusoids."""
    theirs = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    held = dict(theirs.state_dict())
    assert "model.encoder.embed_positions.weight" in held
    assert {"lm_head.weight", "model.encoder.embed_tokens.weight"} <= held.keys()
    torch.save(held, tmp_path / "pytorch_model.bin")
    same(theirs, read(tmp_path).model)
    same(theirs, read(tmp_path / "pytorch_model.bin").model)


def test_shards(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    theirs.save_pretrained(tmp_path, max_shard_size="9KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    same(theirs, read(tmp_path).model)


def test_a_file_beside_its_config(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    same(theirs, read(tmp_path / "model.safetensors").model)


def test_the_model_owns_its_numbers(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "folder")
    model = read(tmp_path / "folder").model
    shutil.rmtree(tmp_path / "folder")
    same(theirs, model)


# How it is used


def test_the_task_says_how_to_search(tmp_path: Path) -> None:
    saved(tmp_path)
    assert read(tmp_path).task == {
        "name": "translate",
        "start": 43,
        "end": 0,
        "pad": 43,
        "banned": [],
        "beams": 1,
        "length": 31,
        "length_penalty": 1.0,
        "renormalize": False,
    }
    # Published folders say it in either file; the second has the last word.
    say(tmp_path, num_beams=6, max_length=29, bad_words_ids=[[43]])
    say(
        tmp_path, "generation_config.json", num_beams=4, renormalize_logits=True, length_penalty=2.0
    )
    task = read(tmp_path).task
    assert task is not None
    assert [task[name] for name in ("beams", "length", "banned")] == [4, 29, [43]]
    assert [task[name] for name in ("renormalize", "length_penalty")] == [True, 2.0]


def test_banned_words_of_several_tokens_are_noted(tmp_path: Path) -> None:
    saved(tmp_path)
    say(tmp_path, bad_words_ids=[[43], [7, 11]])
    imported = read(tmp_path)
    assert imported.task is not None
    assert imported.task["banned"] == [43]
    assert any("[7, 11]" in note for note in imported.notes)


def test_greedy_search_writes_the_same_tokens(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    imported = read(tmp_path)
    model, task = imported.model, imported.task
    assert task is not None
    source, _, lengths = batch()
    mask = (torch.arange(13) < lengths[:, None]).long()
    expected = theirs.generate(
        source, attention_mask=mask, num_beams=1, max_length=17, bad_words_ids=[[task["pad"]]]
    )
    tokens = torch.full((5, 1), task["start"])
    cache = model.cache()
    memory: Tensor | None = model.encode(source, lengths)
    open_ = torch.ones(5, dtype=torch.bool)
    for step in range(expected.shape[1] - 1):
        logits = model.decode(tokens[:, -1:], memory, source_lengths=lengths, cache=cache)[:, -1]
        logits[:, task["pad"]] = -torch.inf
        best = logits.argmax(-1) if step < 15 else torch.full((5,), task["end"])
        tokens = torch.cat((tokens, torch.where(open_, best, task["pad"])[:, None]), 1)
        open_ &= best != task["end"]
        memory = None
    assert tokens.tolist() == expected.tolist()


def test_a_folder_without_a_tokenizer_has_a_note(tmp_path: Path) -> None:
    saved(tmp_path)
    imported = read(tmp_path)
    (note,) = imported.notes
    assert all(name in note for name in ("source.spm", "target.spm", "vocab.json"))
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(os.urandom(7))
    (tmp_path / "vocab.json").write_text(json.dumps({"</s>": 0, "▁a": 46}))
    imported = read(tmp_path)
    assert imported.notes == ()
    assert set(imported.files) == {"source.spm", "target.spm", "vocab.json"}


# What does not fit


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def say(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        read(folder)
    return str(error.value)


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.encoder.layers.0.fc1.bias"]
        del tensors["model.decoder.layers.2.encoder_attn.q_proj.weight"]
        tensors["model.encoder.layers.2.fc1.bias"] = torch.zeros(29)
        tensors["extra"] = torch.zeros(3)
        tensors["model.decoder.layers.1.fc2.weight"] = torch.zeros(29, 33)
        tensors["final_logits_bias"] = torch.zeros(47)
        tensors["model.decoder.embed_tokens.weight"] = torch.zeros(47, 33)
        tensors["model.encoder.layers.1.fc2.bias"] = torch.zeros(33, dtype=torch.int8)

    saved(tmp_path)
    rewrite(tmp_path, spoil)
    said = refused(tmp_path)
    missing, unexpected, misshapen, integer, differing = said.split("; ")
    assert "model.encoder.layers.0.fc1.bias" in missing
    assert "model.decoder.layers.2.encoder_attn.q_proj.weight" in missing
    assert "model.encoder.layers.2.fc1.bias" in unexpected
    assert "extra" in unexpected
    assert "model.decoder.layers.1.fc2.weight (29, 33) for (33, 29)" in misshapen
    assert "final_logits_bias (47,) for (1, 47)" in misshapen
    assert "model.decoder.embed_tokens.weight from model.shared.weight" in differing
    assert "model.encoder.layers.1.fc2.bias" in integer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_attention_heads": 11}, ["attention_heads (3)", "attention_heads (11)"]),
        ({"activation_function": "gelu_new"}, ["gelu_new", "swish"]),
        ({"normalize_before": True}, ["normalize_before (true)"]),
        ({"d_model": "33"}, ["d_model", "33", "int"]),
        ({"d_model": None}, ["d_model"]),
        ({"decoder_vocab_size": 53}, ["vocab_size (47)", "decoder_vocab_size (53)"]),
        ({"encoder_attention_heads": 5, "decoder_attention_heads": 5}, ["heads (5)", "width (33)"]),
        ({"decoder_layers": 4}, ["missing model.decoder.layers.3.self_attn.q_proj.weight"]),
        ({"encoder_layers": 1}, ["unexpected model.encoder.layers.1.fc1.bias"]),
        ({"vocab_size": 48}, ["model.shared.weight (47, 33) for (48, 33)"]),
        ({"dropout": "much"}, ["dropout"]),
        ({"max_position_embeddings": "long"}, ["max_position_embeddings"]),
    ],
)
def test_a_config_that_does_not_fit(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    saved(tmp_path)
    say(tmp_path, decoder_vocab_size=None)
    say(tmp_path, **changes)
    said = refused(tmp_path)
    assert [word for word in words if word not in said] == []


def test_other_positions_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    name = "model.decoder.embed_positions.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.randn(31, 33)}))
    assert name in refused(tmp_path)


def test_another_models_vocabulary_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"</s>": 0, "▁a": 47}))
    said = refused(tmp_path)
    assert "vocab.json" in said
    assert "(47)" in said


# Writing


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "sinusoidal", "output_bias": True, "activation": "relu", "scale": False},
        {"position": "sinusoidal", "width": 34, "heads": 2, "share": "none"},
        {"share": "target", "source": TextSource(vocabulary=53), "activation": "gelu"},
        {"decoder_feed_forward": 13, "decoder_layers": 1},
    ],
)
def test_what_is_written_gives_the_same_logits_there(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = Transformer(replace(ours, **changes)).eval()
    _randomise(model)
    write(model, tmp_path / "out", "marian", task=TASK)
    theirs, said = transformers.MarianMTModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(said.values()), said
    same(theirs, model)
    # And back again, though the sinusoids have been sorted.
    again = read(tmp_path / "out")
    same(theirs, again.model)
    assert again.task is not None
    assert again.task.items() >= TASK.items()


# A model of ours, which starts from a token with a vector of its own


SENTENCES = """a man in a red shirt rides a bicycle down the street
two dogs run through the green grass near a small house
a young girl with brown hair plays in the snow""".splitlines()


@pytest.fixture(
    scope="module", params=["pairs", pytest.param("characters", marks=pytest.mark.slow)]
)
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator of words, as `--for marian` trains it, though this one was not trained."""
    torch.manual_seed(0)
    pairs = request.param == "pairs"
    tokenizer = Tokenizer.bpe(SENTENCES * 2, 300) if pairs else Tokenizer.characters(SENTENCES)
    config = replace(ours, vocabulary=tokenizer.size, position="sinusoidal", length=97)
    model = Transformer(config).eval()
    _randomise(model)
    settings = SearchSettings.of(tokenizer, beams=1, length=41)
    folder = tmp_path_factory.mktemp("own")
    checkpoint.save(
        folder / "model",
        model,
        files=tokenizer_files(tokenizer, tokenizer),
        task={"name": "translate", **vars(settings), "banned": list(settings.banned)},
    )
    saved = checkpoint.load(folder / "model")
    found = write(saved.model, folder / "marian", "marian", files=saved.files, task=saved.task)
    assert found.difference < 1e-6 * max(10, found.largest)
    return folder


def written(own: Path) -> list[str]:
    return [text.strip() for text in load(own / "model").translate(SENTENCES)]


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_transformers_opens_all_of_it(own: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(own / "marian")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(own / "marian").eval()
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    assert (
        inputs["input_ids"][:, -1].max() == tokenizer.pad_token_id == theirs.config.vocab_size - 1
    )
    source = load(own / "model").source_tokenizer
    for sentence in SENTENCES:
        assert tokenizer(sentence)["input_ids"] == [*source.encode(sentence), 2]
    found = theirs.generate(**inputs, num_beams=1, do_sample=False, max_length=42)
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    for have, want in zip(texts, written(own)):
        assert want.startswith(have.strip()[:40])  # its last token is forced to be the end
        assert len(have) > 10


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_the_converter_of_ctranslate2_opens_it(own: Path, tmp_path: Path) -> None:
    engine = pytest.importorskip("ctranslate2")
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(own / "marian")).convert(str(tmp_path / "out"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(own / "marian")
    translator = engine.Translator(str(tmp_path / "out"), intra_threads=1)
    banned = [["<unused0>"], ["<s>"], ["<unk>"]]
    for sentence, want in zip(SENTENCES, written(own)):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(sentence)["input_ids"])
        (result,) = translator.translate_batch(
            [tokens], beam_size=1, max_decoding_length=41, suppress_sequences=banned
        )
        ids = tokenizer.convert_tokens_to_ids(result.hypotheses[0])
        assert want.startswith(tokenizer.decode(ids).strip()[:40])


def test_it_comes_back_without_a_word(own: Path) -> None:
    imported = read(own / "marian")
    assert imported.notes == ()
    native = load(own / "model")
    model, first = imported.model, native.model
    N = first.config.vocabulary
    source, target = torch.randint(4, N, (3, 7)), torch.randint(4, N, (3, 5))
    begun = [torch.cat((torch.full((3, 1), start), target), 1) for start in (1, N)]
    with torch.no_grad():
        expected, found = first(source, begun[0]), model(source, begun[1])
    assert (found[..., :N] - expected).abs().max() < 1e-5 * expected.abs().max()
    assert found[..., N].max() < -1000
    task = {"name": "translate", **(imported.task or {})}
    checkpoint.save(own / "again", model, files=imported.files, task=task)
    assert [text.strip() for text in load(own / "again").translate(SENTENCES)] == written(own)


def test_a_start_of_both_kinds_is_refused(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own / "marian", tmp_path / "odd")

    def both(tensors: dict[str, Tensor]) -> None:
        tensors["model.shared.weight"][-1] = 1.0

    rewrite(tmp_path / "odd", both)
    with pytest.raises(ValueError, match="has a vector of its own"):
        read(tmp_path / "odd")


@pytest.mark.parametrize("size", ["tiny", "base"])
def test_what_for_marian_trains_can_be_written(size: Any) -> None:
    from dataclasses import asdict

    shape = replace(preset(size).model, **shape_for("marian", "translate"))
    with torch.device("meta"):
        model = Transformer(TransformerConfig(47, **asdict(shape)))
    marian._refuse(model, TASK)
    with pytest.raises(ValueError, match="is for translate and dates: read trains no model"):
        shape_for("marian", "read")
    with pytest.raises(ValueError, match=r"--for \(mars\) is unknown; choose from ctranslate2"):
        shape_for("mars", "translate")
    assert shape_for("ctranslate2", "translate") == {}


def test_there_and_back_is_the_same_folder(tmp_path: Path) -> None:
    saved(tmp_path / "theirs")
    first = read(tmp_path / "theirs")
    write(first.model, tmp_path / "out", "marian", task=first.task)
    second = read(tmp_path / "out")
    assert second.model.config == first.model.config
    assert second.task == first.task
    for name, tensor in first.model.state_dict().items():
        assert second.model.state_dict()[name].equal(tensor)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "pre"}, ["norm='post'"]),
        ({"final_norm": True}, ["final_norm=False"]),
        ({"activation": "swiglu"}, ["swiglu"]),
        ({"position": "rotary", "width": 30}, ["rotary"]),
        ({"position": "learned", "epsilon": 1e-6}, ["learned", "1e-06"]),
        ({"key_heads": 1}, ["key heads (1)", "heads (3)"]),
        ({"source": AudioSource(features=7)}, ["audio"]),
        ({"window": 5}, ["no window (5)"]),
        ({"mixer": "gru", "width": 36}, ["self-attention, not gru"]),
    ],
)
def test_what_marian_has_no_place_for(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    model = Transformer(replace(ours, **changes))
    with pytest.raises(ValueError, match=r"\AMarian has no such model: [^\n]+\Z") as error:
        write(model, tmp_path / "out", "marian", task=TASK)
    assert [word for word in words if word not in str(error.value)] == []
    assert not (tmp_path / "out").exists()


def test_parts_of_ones_own_are_refused(tmp_path: Path) -> None:
    class Mine(MultiHeadAttention):
        pass

    model = Transformer(ours, attention=lambda position: Mine(33, 3))
    with pytest.raises(ValueError, match=r"encoder\.blocks\.0\.attention is a Mine, which"):
        write(model, tmp_path / "out", "marian", task=TASK)
    language = LanguageModel(LanguageConfig(47, width=30, heads=3, layers=1))
    with pytest.raises(ValueError, match="LanguageModel"):
        write(language, tmp_path / "out", "marian", task=TASK)


@pytest.mark.parametrize("task", [None, {}, {"start": 2, "end": 3}, TASK | {"pad": 47}])
def test_tokens_must_be_known(tmp_path: Path, task: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]*pad \((None|47)\)[^\n]*\Z"):
        write(Transformer(ours), tmp_path / "out", "marian", task=task)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="name a new one"):
        write(Transformer(ours), tmp_path, "marian", task=TASK)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out was not saved.*No such file"):
        marian.write(
            Transformer(ours),
            tmp_path / "out",
            files={"source.spm": tmp_path / "absent"},
            task=TASK,
        )
    assert list(tmp_path.iterdir()) == []
