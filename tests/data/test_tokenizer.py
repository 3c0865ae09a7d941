"""Tokenizers: nothing is lost, nothing is invented, and the quick way is the library's."""

import io
import json
import pickle
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from regard.data.tokenizer import (
    SPECIALS,
    SentencePieceTokenizer,
    Tokenizer,
    files,
    read_pair,
)

TEXTS = [
    "A man in an orange hat starring at something.",
    "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    "Les élèves étaient déjà là; l'été aussi.",
    "हिन्दी में लिखा हुआ वाक्य",
    "日本語の文です。",
    "Лето было длинным: 366 дней.",
    "one two  three\tfour\nfive",
] * 3


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.bpe(TEXTS, 421)


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return Tokenizer.characters(TEXTS)


ODD = [
    "",
    " ",
    "  ",
    " a",
    "a ",
    "a  b",
    "a   b",
    "a\t \tb",
    "a\n\n b",
    "\u00a0x y",
    "e\u0301 e \u0301",
    "\u0301",
    "<s> x </s><pad>",
    "🙂👩\u200d👩\u200d👧 x",
    "\x00 \ufeff",
    "١٢٣ 123",
    "don't l'été 's",
]


@pytest.mark.parametrize("text", [*TEXTS[:7], *ODD])
def test_bytes_lose_nothing(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == unicodedata.normalize("NFC", text)
    assert not {bpe.pad, bpe.start, bpe.end, bpe.unknown} & set(ids)


words = st.text(st.sampled_from("ab éé́ \t\n\u00a0हि本1.,'<s>\u200b"), max_size=13)


@given(st.one_of(words, st.text(max_size=17)))
def test_words_one_by_one_are_the_library_s_text(text: str) -> None:
    for tokenizer in _both():
        slow = tokenizer.inner.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == slow
        assert tokenizer.encode_batch(["a b", text, ""])[1] == slow


_made: list[Tokenizer] = []


def _both() -> list[Tokenizer]:
    if not _made:
        _made.extend((Tokenizer.bpe(TEXTS, 421), Tokenizer.characters(TEXTS)))
    return _made


@given(words)
def test_decoding_gives_the_text_back(text: str) -> None:
    assert _both()[0].decode(_both()[0].encode(text)) == unicodedata.normalize("NFC", text)


def test_specials(bpe: Tokenizer, characters: Tokenizer) -> None:
    for tokenizer in (bpe, characters):
        roles = (tokenizer.pad, tokenizer.start, tokenizer.end, tokenizer.unknown)
        assert roles == (0, 1, 2, 3)
        assert tuple(tokenizer.pieces(roles)) == SPECIALS
        ids = tokenizer.encode("one two")
        assert tokenizer.decode([1, *ids, 2, 0, 0]) == "one two"


def test_size(bpe: Tokenizer) -> None:
    assert bpe.size == 421
    assert Tokenizer.bpe(["a"], 421).size == 4 + 256
    with pytest.raises(ValueError, match=r"vocabulary \(100\) must be at least 260"):
        Tokenizer.bpe(TEXTS, 100)


def test_characters(characters: Tokenizer) -> None:
    assert characters.pieces(characters.encode("l'été a")) == list("l'été▁a")
    assert characters.encode("Ω") == [characters.unknown]
    assert characters.decode(characters.encode("one  two\tfour")) == "one  two\tfour"
    assert characters.size == 4 + len(set("".join(TEXTS)))


def test_characters_without_spaces() -> None:
    tokenizer = Tokenizer.characters(["ab"])
    assert tokenizer.encode("a b") == [4, 3, 5]


def test_pieces_are_readable(bpe: Tokenizer) -> None:
    assert bpe.pieces(bpe.encode("Mann 36")) == ["▁Man", "n", "▁3", "6"]
    assert bpe.pieces(bpe.encode("🙂"))[1:] == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert bpe.pieces([99_999]) == ["<99999>"]


def test_the_same_texts_give_the_same_file() -> None:
    program = (
        "import sys; from regard.data.tokenizer import Tokenizer; "
        f"sys.stdout.buffer.write(Tokenizer.bpe({TEXTS[::-1]!r}, 421).to_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == Tokenizer.bpe(iter(TEXTS), 421).to_bytes()


def test_files_come_back(bpe: Tokenizer, characters: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (bpe, characters):
        path = tmp_path / "tokenizer.json"
        path.write_bytes(tokenizer.to_bytes())
        for back in (
            Tokenizer.read(path),
            Tokenizer.from_files(tmp_path),
            pickle.loads(pickle.dumps(tokenizer)),
        ):
            assert back.to_bytes() == tokenizer.to_bytes()
            assert back.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
            assert (back.pad, back.start, back.end, back.unknown) == (0, 1, 2, 3)


def test_packed(bpe: Tokenizer) -> None:
    ids, lengths = bpe.encode_packed(TEXTS)
    one = [bpe.encode(text) for text in TEXTS]
    assert ids.tolist() == [i for each in one for i in each]
    assert lengths.tolist() == [len(each) for each in one]
    ids, lengths = bpe.encode_packed([])
    assert len(ids) == len(lengths) == 0
    assert bpe.encode_batch([]) == []
    assert bpe.decode(np.array(one[0])) == TEXTS[0]
    assert bpe.decode_batch(one) == TEXTS


def _other(path: Path, names: list[str], *, padded: bool = False) -> Path:
    """A tokenizer of somebody else's."""
    vocabulary = {name: i for i, name in enumerate([*names, "one", "two"])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=names[-1]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if padded:
        inner.enable_padding(length=11)
        inner.enable_truncation(2)
    inner.save(str(path))
    return path


def test_another_tokenizer(tmp_path: Path) -> None:
    path = _other(tmp_path / "t.json", ["[PAD]", "[CLS]", "[SEP]", "[UNK]"], padded=True)
    tokenizer = Tokenizer.read(path)
    assert (tokenizer.pad, tokenizer.start, tokenizer.end, tokenizer.unknown) == (0, 1, 2, 3)
    # Neither padded nor cut, whatever the file asks for.
    assert tokenizer.encode("one two one x") == [4, 5, 4, 3]
    assert tokenizer.decode([1, 4, 5, 2]) == "one two"


def test_specials_may_be_named(tmp_path: Path) -> None:
    path = _other(tmp_path / "t.json", ["<|endoftext|>", "?"])
    with pytest.raises(ValueError, match=r"known to mean pad or start or end .*<pad> \[PAD\]"):
        Tokenizer.read(path)
    ends = "<|endoftext|>"
    tokenizer = Tokenizer.read(path, pad=0, start=ends, end=ends)
    assert (tokenizer.pad, tokenizer.start, tokenizer.end, tokenizer.unknown) == (0, 0, 0, None)
    with pytest.raises(ValueError, match="no token 'x' to mean start"):
        Tokenizer.read(path, start="x")
    with pytest.raises(ValueError, match="no token 99 to mean pad"):
        Tokenizer.read(path, pad=99)


@pytest.mark.usefixtures("unchecked")
def test_errors(bpe: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.json does not exist"):
        Tokenizer.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"bad.json is not a tokenizer.json: .+"):
        Tokenizer.read(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="half a letter"):
        bpe.encode("a \ud800")
    with pytest.raises(ValueError, match="half a letter"):
        Tokenizer.bpe(["\udc80"], 300)
    with pytest.raises(ValueError, match="text 1 is a int; pass strings"):
        bpe.encode_batch(["a\t", 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="not one; pass"):
        Tokenizer.characters("abc")
    for learn in (lambda: Tokenizer.bpe([], 300), lambda: Tokenizer.characters([""])):
        with pytest.raises(ValueError, match="there is no text"):
            learn()
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_pair(tmp_path)


def test_pairs_in_a_folder(bpe: Tokenizer, characters: Tokenizer, tmp_path: Path) -> None:
    for source, target, names in (
        (bpe, bpe, {"tokenizer.json"}),
        (bpe, characters, {"source.tokenizer.json", "target.tokenizer.json"}),
    ):
        folder = tmp_path / str(len(names))
        folder.mkdir()
        kept = files(source, target)
        assert set(kept) == names
        for name, data in kept.items():
            (folder / name).write_bytes(data)
        back = read_pair(folder)
        assert (back[0] is back[1]) == (source is target)
        assert [one.to_bytes() for one in back] == [source.to_bytes(), target.to_bytes()]


# Marian


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Marian's are, with its two languages in one vocabulary."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("marian")
    pieces: dict[str, None] = {}
    for side, texts in (("source", TEXTS[:1]), ("target", TEXTS[1:3])):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts * 7),
            model_writer=model,
            vocab_size=59,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / f"{side}.spm").write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        cut = (processor.id_to_piece(i) for i in range(3, processor.get_piece_size()))
        pieces.update(dict.fromkeys(cut))
    names = ["</s>", "<unk>", *pieces, ">>deu<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    return folder


def test_marian_folders(marian: Path) -> None:
    source, target = read_pair(marian)
    assert isinstance(source, SentencePieceTokenizer)
    assert (source.end, source.unknown) == (0, 1)
    assert source.pad == source.start == source.size - 1
    for tokenizer, text in ((source, TEXTS[0]), (target, TEXTS[1])):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, tokenizer.end]) == text
        assert "".join(tokenizer.pieces(ids)) == "▁" + text.replace(" ", "▁")
        packed, lengths = tokenizer.encode_packed([text, "", text])
        assert packed.tolist() == ids * 2
        assert lengths.tolist() == [len(ids), 0, len(ids)]
        assert tokenizer.encode_batch([]) == []
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.encode(text) == ids
    code = source.encode(">>deu<< A man")
    assert source.pieces(code)[0] == ">>deu<<"
    assert set(files(source, target)) == {"source.spm", "target.spm", "vocab.json"}


@pytest.mark.filterwarnings("ignore")
def test_marian_is_the_library_s(marian: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.MarianTokenizer(
        str(marian / "source.spm"), str(marian / "target.spm"), str(marian / "vocab.json")
    )
    source, target = read_pair(marian)
    for text in (TEXTS[0], "xyz? Man!", ">>deu<< A man", ">>nop<< A", ""):
        assert [*source.encode(text), source.end] == peer(text).input_ids
        assert [*target.encode(text), target.end] == peer(text_target=text).input_ids
        ids = target.encode(text)
        assert target.decode(ids) == peer.decode(ids, skip_special_tokens=True)


@pytest.mark.usefixtures("unchecked")
def test_marian_errors(marian: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks source.spm, target.spm, vocab.json"):
        SentencePieceTokenizer.read(tmp_path, "source")
    given = {path.name: path.read_bytes() for path in marian.iterdir()} | {"vocab.json": b"{}"}
    with pytest.raises(ValueError, match=r"vocab.json lacks <pad> and </s> and <unk>"):
        SentencePieceTokenizer(given, "source")
    with pytest.raises(ValueError, match="half a letter"):
        SentencePieceTokenizer.read(marian, "source").encode("\ud800")
