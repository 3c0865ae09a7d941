"""Atomic writes: a file or a folder is replaced whole, or not at all.

    write(path, text)                    a small file
    with file(path) as draft:            a file that something else writes
        save_file(tensors, draft)
    with draft(target) as new:           a folder, filled in beside its target
        …
        replace(new, target, ours)       and then swapped with it

Everything is synced to the disk before the swap. Linux and macOS swap two folders' names in one
call. Elsewhere the old folder is renamed first; a process killed between the two renames leaves it
there, where `standing` finds it and `recover` puts it back. Drafts are locked while they are
written, so that those of killed processes can be told apart and removed.
"""

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal


def write(path: Path, content: str | bytes) -> None:
    """Replaces a file's content atomically; text is encoded as UTF-8."""
    with file(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def file(path: Path) -> Iterator[Path]:
    """Where to write a file's new content, which replaces the old one if the block succeeds.

    The draft has the file's own name, in a folder of its own that is removed afterwards. A link
    stays, and what it leads to is replaced, with its mode; a device or a pipe is written to as it
    is.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    target = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        clear(target)
        with draft(target) as folder:
            new = folder / target.name
            yield new
            sync(new)
            keep_mode(target, new)
            os.replace(new, target)
            sync_folder(target.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, f"not written: {error.strerror}", str(path)) from error


@contextmanager
def draft(target: Path) -> Iterator[Path]:
    """A new folder beside the target, locked while it is written and removed afterwards."""
    while True:
        draft = target.with_name(f".{target.name}.saving-{secrets.token_hex(4)}")
        draft.mkdir()
        try:
            lock = _lock(draft)
        except OSError:
            lock = -1  # A filesystem without locks: nobody will take this folder for a dead one.
        if lock is not None:
            break
    try:
        yield draft
    finally:
        # Unfinished, or the folder that was replaced; what cannot be removed now, the next save
        # removes.
        shutil.rmtree(draft, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def replace(draft: Path, target: Path, ours: Callable[[Path], set[str]] | None = None) -> None:
    """Puts the draft in the target's place atomically, and removes the old folder.

    `ours` names the files in the old folder that may go; all others are carried over. Without it
    nothing is.
    """
    old = _swap_in(draft, target)
    sync_folder(target.parent)
    if old is not None:
        if ours is not None:
            # What others put into the old folder until the last moment.
            with suppress(OSError, ValueError):
                carry(old, target, ours(old))
        shutil.rmtree(old, ignore_errors=True)


def _swap_in(draft: Path, target: Path) -> Path | None:
    """Renames the draft to the target; returns where the old folder is now, if there was one."""
    try:
        os.rename(draft, target)  # where nothing is, or an empty folder
        return None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _swap(draft, target):
        return draft
    aside = draft.with_name(draft.name.replace(".saving-", ".replaced-"))
    os.rename(target, aside)
    try:
        os.rename(draft, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return aside


def _swap(one: Path, other: Path) -> bool:
    """Swaps two folders' names in one call; False where system or filesystem cannot."""
    if sys.platform == "win32":
        return False
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            swap = 2  # RENAME_SWAP
            failed = library.renamex_np(*names, ctypes.c_uint(swap))
        else:
            here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
            failed = library.renameat2(here, names[0], here, names[1], ctypes.c_uint(swap))
    except AttributeError:  # a C library without the function
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def standing(folder: Path) -> Path:
    """Where a folder is: in its place, or aside where a save was killed between two renames."""
    target = Path(os.path.realpath(folder))
    for _ in range(2):
        if target.is_dir():
            return folder
        if os.path.lexists(target):
            raise ValueError(f"{folder} is not a folder; name the folder of a run or of a model")
        if aside := _siblings(target, "replaced"):
            return next(iter(aside.values()))
        # A living save may have put the new one into place since the first look.
    raise ValueError(f"{folder} does not exist; name the folder of a run or of a model")


def recover(target: Path) -> None:
    """Puts the old folder back where a save was killed between its two renames."""
    asides = _siblings(target, "replaced")
    if asides and not (target.exists() and os.listdir(target)):
        alive = _alive(target)
        for token, path in asides.items():
            if token not in alive:
                os.rename(path, target)
                return


def clear(target: Path) -> None:
    """Removes what killed processes have left beside a target."""
    alive = _alive(target)
    for token, path in _siblings(target, "replaced").items():
        if token not in alive:
            shutil.rmtree(path, ignore_errors=True)


def clear_all(folder: Path) -> None:
    """Removes what killed processes have left in a folder, whatever its target."""
    with os.scandir(folder) as entries:
        names = {target for entry in entries if (target := draft_target(entry.name))}
    for name in names:
        clear(folder / name)


def draft_target(name: str) -> str | None:
    """The name that a draft was to get, or that a replaced folder had; None for other names."""
    match = re.fullmatch(r"\.(.+)\.(saving|replaced)-[0-9a-f]{8}", name)
    return match and match[1]


def _alive(target: Path) -> set[str]:
    """Tokens of drafts still being written, or that may be; the others' folders are removed."""
    alive = set()
    for token, path in _siblings(target, "saving").items():
        try:
            lock = _lock(path)
        except OSError:
            lock = None
        if lock is None:
            alive.add(token)
        else:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    return alive


def _siblings(target: Path, what: Literal["saving", "replaced"]) -> dict[str, Path]:
    """Drafts, or replaced folders, beside the target by the token in their names, newest first."""
    name = re.compile(rf"\.{re.escape(target.name)}\.{what}-([0-9a-f]{{8}})")
    dated = []
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if match := name.fullmatch(entry.name):
                dated.append((entry.stat().st_mtime_ns, match[1], Path(entry.path)))
    return {token: path for _, token, path in sorted(dated, reverse=True)}


def _lock(folder: Path) -> int | None:
    """A lock on a folder, or None where another process has it or the folder is gone.

    An OSError where there are no locks.
    """
    if sys.platform == "win32":
        raise OSError("no locks on folders")
    import fcntl

    try:
        opened = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another save may have found the folder before it was locked, and removed it.
        if os.path.samestat(os.fstat(opened), os.stat(folder)):
            return opened
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(opened)
        raise
    os.close(opened)
    return None


def carry(old: Path, new: Path, ours: set[str]) -> None:
    """Links files that are not ours into the new folder, so that who writes to them can go on."""
    for entry in list(os.scandir(old)):
        goal = new / entry.name
        if entry.name in ours:
            continue
        with suppress(FileNotFoundError):  # removed since it was listed
            if entry.is_dir(follow_symlinks=False):
                goal.mkdir(exist_ok=True)
                carry(Path(entry.path), goal, set())
                shutil.copystat(entry.path, goal)
                sync_folder(goal)
            elif os.path.lexists(goal):
                continue
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), goal)
            else:
                _link(entry.path, goal)


def _link(source: str, goal: Path) -> None:
    try:
        os.link(source, goal)
    except FileNotFoundError:
        raise
    except OSError:  # a filesystem without links
        shutil.copy2(source, goal)
        sync(goal)


def keep_mode(old: Path, new: Path) -> None:
    """Gives a new file the mode of the file that it replaces, if there is one."""
    with suppress(FileNotFoundError):
        shutil.copymode(old, new)


def sync(path: Path) -> None:
    """Waits until a file is on the disk (fsync)."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_folder(path: Path) -> None:
    with suppress(OSError):  # not every filesystem can
        sync(path)
