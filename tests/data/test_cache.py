"""The cache's folder is blamed for its own errors alone."""

import errno
import os
from pathlib import Path

import pytest

from regard.data.cache import keep


@pytest.mark.parametrize("named", [True, False])
def test_errors_of_the_data_do_not_blame_the_cache(
    named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.txt"

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), *([str(data)] if named else []))

    said = str(data) if named else "a file"
    with pytest.raises(ValueError, match=f"^{said} could not be read or written .Input/output"):
        keep(tmp_path / "cache", "key", lambda folder: None, fail)
    assert not capsys.readouterr().err


def test_an_error_of_the_cache_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"

    def make(folder: Path) -> Path:
        if folder == cache:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / "key"))
        return folder

    assert keep(cache, "key", lambda folder: None, make) != cache
    assert "cannot be used as a cache (Permission denied)" in capsys.readouterr().err
