"""Damaged folders: each is refused in one clear line, or gives the very weights that were saved.

Within a second, and without the memory that a hostile file asks for. Damage is what disks,
downloads and editors do to files; and what somebody would write on purpose, with checksums that
fit, to make a loader build something huge.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import Transformer, VisionTransformer, checkpoint, load
from regard.data.tokenizer import Tokenizer
from regard.data.tokenizer import files as tokenizer_files
from regard.interop import read as read_foreign
from regard.interop import write as write_foreign
from regard.model.transformer import TransformerConfig
from regard.model.vit import VisionConfig
from regard.task.search import SearchSettings

Files = dict[str, bytes]
Damage = Callable[[random.Random, Files], None]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SMALL: dict[str, Any] = {"width": 8, "heads": 2, "feed_forward": 11}
FEW, MANY = 200, 5000


# Folders as they should be


def translator(folder: Path) -> None:
    tokenizer = Tokenizer.characters(["some letters"])
    config = TransformerConfig(tokenizer.size, **SMALL, encoder_layers=1, decoder_layers=1)
    settings = SearchSettings.of(tokenizer)
    checkpoint.save(
        folder,
        Transformer(config),
        files=tokenizer_files(tokenizer, tokenizer),
        task={"name": "translate", **vars(settings), "banned": list(settings.banned)},
    )


def classifier(folder: Path) -> None:
    model = VisionTransformer(VisionConfig(3, 8, 4, **SMALL, layers=1, channels=1))
    task = {"name": "classify", "labels": ["a", "b", "c"], "mean": [0.5], "std": [0.5]}
    checkpoint.save(folder, model, task=task | {"size": [8, 8]})


def marian(folder: Path) -> None:
    config = TransformerConfig(23, **SMALL, encoder_layers=1, decoder_layers=1, activation="silu")
    write_foreign(Transformer(config), folder, "marian", task={"start": 1, "end": 2, "pad": 0})


def vit(folder: Path) -> None:
    model = VisionTransformer(VisionConfig(3, 8, 4, **SMALL, layers=1))
    task = {"labels": ["a", "b", "c"], "mean": [0.5] * 3, "std": [0.5] * 3, "resize": "shortest"}
    write_foreign(model, folder, "vit", task=task)


def ctranslate2(folder: Path) -> None:
    pytest.importorskip("ctranslate2")
    config = TransformerConfig(23, **SMALL, encoder_layers=1, decoder_layers=1)
    write_foreign(Transformer(config), folder, "ctranslate2")


# What happens to files


def some_file(chance: random.Random, files: Files) -> str:
    return chance.choice(sorted(files))


def truncated(chance: random.Random, files: Files) -> None:
    name = some_file(chance, files)
    files[name] = files[name][: chance.randrange(len(files[name]))]


def flipped(chance: random.Random, files: Files) -> None:
    name = some_file(chance, files)
    content = bytearray(files[name])
    for _ in range(chance.choice((1, 1, 2, 8))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    files[name] = bytes(content)


def overwritten(chance: random.Random, files: Files) -> None:
    name = some_file(chance, files)
    content, begin = bytearray(files[name]), chance.randrange(len(files[name]))
    length = chance.randrange(1, 513)
    filling = chance.choice((bytes(length), b"\xff" * length, chance.randbytes(length)))
    content[begin : begin + length] = filling
    files[name] = bytes(content)


def appended(chance: random.Random, files: Files) -> None:
    name = some_file(chance, files)
    files[name] += chance.choice((b"\0", b"\n{}", files[name], chance.randbytes(77)))


def emptied(chance: random.Random, files: Files) -> None:
    files[some_file(chance, files)] = b""


def deleted(chance: random.Random, files: Files) -> None:
    del files[some_file(chance, files)]


def renamed(chance: random.Random, files: Files) -> None:
    name = some_file(chance, files)
    files[chance.choice((name + ".bak", name.upper(), "x" + name))] = files.pop(name)


def exchanged(chance: random.Random, files: Files) -> None:
    one, two = chance.sample(sorted(files), 2)
    files[one], files[two] = files[two], files[one]


# What happens to the weights


def unpacked(content: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def packed(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def swapped_tensors(chance: random.Random, files: Files) -> None:
    header, data = unpacked(files[WEIGHTS])
    one, two = chance.sample(tensors(header), 2)
    header[one], header[two] = header[two], header[one]
    files[WEIGHTS] = packed(header, data)


def reshaped(chance: random.Random, files: Files) -> None:
    header, data = unpacked(files[WEIGHTS])
    one = header[chance.choice(tensors(header))]
    shape = one["shape"]
    one["shape"] = chance.choice(
        (shape[::-1], [*shape, 1], [0], [], [2**40], [-1], ["8"], [2**63], None, [1.5])
    )
    files[WEIGHTS] = packed(header, data)


def retyped(chance: random.Random, files: Files) -> None:
    header, data = unpacked(files[WEIGHTS])
    one = header[chance.choice(tensors(header))]
    one["dtype"] = chance.choice(("I32", "F64", "BF16", "F16", "BOOL", "U8", "Q4", None, 7, ""))
    files[WEIGHTS] = packed(header, data)


def moved(chance: random.Random, files: Files) -> None:
    header, data = unpacked(files[WEIGHTS])
    one = header[chance.choice(tensors(header))]
    begin, end = one["data_offsets"]
    one["data_offsets"] = chance.choice(
        ([begin + 4, end + 4], [0, end - begin], [end, begin], [0, 2**62], [-8, 0], [begin], None)
    )
    files[WEIGHTS] = packed(header, data)


def renamed_tensor(chance: random.Random, files: Files) -> None:
    header, data = unpacked(files[WEIGHTS])
    name = chance.choice(tensors(header))
    header[chance.choice((name + "x", "", "a" * 10_000, "\ud800", "../" + name))] = header.pop(name)
    files[WEIGHTS] = packed(header, data)


def huge_header(chance: random.Random, files: Files) -> None:
    sizes = (2**63, 2**64 - 1, 2**40, 10**9, len(files[WEIGHTS]), 0, 1)
    files[WEIGHTS] = struct.pack("<Q", chance.choice(sizes)) + files[WEIGHTS][8:]


def deep_header(chance: random.Random, files: Files) -> None:
    depth = chance.choice((100, 5000, 200_000))
    text = chance.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
    files[WEIGHTS] = struct.pack("<Q", len(text)) + text + files[WEIGHTS][-100:]


# What somebody might write


HOSTILE = (10**18, 10**9, 2**63, -1, 0, 1.5, 1e308, None, True, "", "8", [], [8], {}, "\0", "../x")


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def changed(chance: random.Random, data: Any) -> None:
    """One value anywhere is another."""
    *path, last = chance.choice(list(places(data)))
    for key in path:
        data = data[key]
    if isinstance(data, dict) and chance.random() < 0.2:
        value = data.pop(last)
        if chance.random() < 0.5:
            data[f"{last}_"] = value
    else:
        data[last] = chance.choice(HOSTILE)


def hostile_config(chance: random.Random, files: Files) -> None:
    name = chance.choice([name for name in files if name.endswith(".json")])
    data = json.loads(files[name])
    for _ in range(chance.choice((1, 1, 2, 4))):
        changed(chance, data)
    files[name] = json.dumps(data).encode()


def odd_json(chance: random.Random, files: Files) -> None:
    name = chance.choice([name for name in files if name.endswith(".json")])
    text = files[name]
    files[name] = chance.choice(
        (
            b"\xef\xbb\xbf" + text,
            text.decode().encode("utf-16"),
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b"NaN",
            b"null",
            b"[]",
            text.replace(b": ", b': NaN, "x": ', 1),
            text.rstrip()[:-1] + b', "format": 1, "format": 2}',
            b"9" * 10_000,
            text.replace(b"1", b"1" * 5000, 1),
        )
    )


def forged(chance: random.Random, files: Files) -> None:
    """A hostile config with everything else made to fit: the weights' header and all checksums."""
    config = json.loads(files[CONFIG])
    if "regard" not in config:
        hostile_config(chance, files)
        return
    for _ in range(chance.choice((1, 2))):
        changed(chance, config["model"])
    header, data = unpacked(files[WEIGHTS])
    about = {name: config[name] for name in ("kind", "model", "task")}
    header["__metadata__"] = {"regard": json.dumps(about)}
    files[WEIGHTS] = packed(header, data)
    config["files"] = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
        if name not in (CONFIG, "README.md")
    }
    files[CONFIG] = json.dumps(config).encode()


OF_WEIGHTS: tuple[Damage, ...] = (
    *(swapped_tensors, reshaped, retyped, moved, renamed_tensor, huge_header, deep_header),
)
DAMAGES: tuple[Damage, ...] = (
    *(truncated, flipped, overwritten, appended, emptied, deleted, renamed, exchanged),
    *OF_WEIGHTS,
    *(hostile_config, odd_json, forged),
)


# Loading them


def equal(one: nn.Module, two: dict[str, Tensor]) -> bool:
    state = one.state_dict()
    return state.keys() == two.keys() and all(
        state[name].dtype == two[name].dtype and state[name].equal(two[name]) for name in state
    )


@contextmanager
def little_memory() -> Iterator[None]:
    """A large allocation fails here, and takes no other process with it."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def opened(folder: Path, ours: bool) -> nn.Module:
    if ours:
        return load(folder).model
    return read_foreign(folder).model


def survives(make: Callable[[Path], None], count: int, tmp_path: Path, ours: bool) -> None:
    torch.manual_seed(0)
    make(tmp_path / "whole")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    expected = opened(tmp_path / "whole", ours).state_dict()
    refused, same = 0, 0
    folder = tmp_path / "damaged"
    with little_memory():
        for n in range(count):
            chance, files = random.Random(n), dict(whole)
            known = [one for one in DAMAGES if WEIGHTS in files or one not in OF_WEIGHTS]
            damage = known[n % len(known)]
            damage(chance, files)
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            begun = time.process_time()
            try:
                model = opened(folder, ours)
            except ValueError as error:
                refused += 1
                said = str(error)
                assert said, (n, damage.__name__)
                assert len(said.splitlines()) == 1, (n, damage.__name__, said)
            except Exception as error:
                raise AssertionError(f"{n}: {damage.__name__} gave {error!r}") from error
            else:
                # A foreign folder has no checksums: a flipped bit of a weight is another weight.
                same += 1
                if ours:
                    assert equal(model, expected), (n, damage.__name__)
            assert time.process_time() - begun < 1, (n, damage.__name__)
            shutil.rmtree(folder)
    assert refused > count // 3
    assert same > 0


@pytest.mark.parametrize("make", [translator, classifier])
@pytest.mark.parametrize(
    "count",
    [pytest.param(FEW // 4, id="few"), pytest.param(MANY // 2, id="many", marks=pytest.mark.slow)],
)
def test_our_own_folders(make: Callable[[Path], None], count: int, tmp_path: Path) -> None:
    survives(make, count, tmp_path, ours=True)


@pytest.mark.parametrize("make", [ctranslate2, marian, vit])
@pytest.mark.parametrize(
    "count",
    [pytest.param(FEW // 4, id="few"), pytest.param(MANY // 4, id="many", marks=pytest.mark.slow)],
)
def test_other_libraries_folders(make: Callable[[Path], None], count: int, tmp_path: Path) -> None:
    survives(make, count, tmp_path, ours=False)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "tokenizer.json"])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    """Things that never end, or never answer, in a file's place."""
    translator(tmp_path / "whole")
    for n, put in enumerate(
        (
            lambda path: path.mkdir(),
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path),
            lambda path: os.mkfifo(path),
            lambda path: path.symlink_to("nowhere"),
        )
    ):
        folder = tmp_path / str(n)
        shutil.copytree(tmp_path / "whole", folder)
        (folder / name).unlink()
        put(folder / name)
        with pytest.raises(ValueError, match=r"\w") as caught:
            load(folder)
        assert len(str(caught.value).splitlines()) == 1
