"""Files that are written whole, errors that name what was to be written, and the cache of a user without a home."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ptdbench import files


def test_read_only_error_names_the_target(tmp_path, monkeypatch):
    """Simulated: there even the removal of a file that is not there fails, and nobody but root can mount one."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        files.replace_bytes(tmp_path / "report.html", b"")
    assert caught.value.filename == str(tmp_path / "report.html")


@pytest.mark.parametrize(("free", "text"), [(4096, "[Errno 28] No space left on device: {folder!r}"), (1 << 30, None)])
def test_full_disk_is_found_behind_a_librarys_error(tmp_path, monkeypatch, free, text):
    """Simulated: Kineto leaves out the file, and the reader does not find it."""
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    lack = files.lack_of_space(FileNotFoundError(errno.ENOENT, "trace.json"), tmp_path)
    assert (str(lack) if lack else None) == (text and text.format(folder=str(tmp_path)))


@pytest.mark.parametrize("answer", [RuntimeError("could not determine the home directory"), Path("~/.cache/ptdbench")])
def test_cache_without_a_home_is_a_private_temporary_folder(tmp_path, monkeypatch, answer):
    def of_no_user(_: str) -> Path:
        if isinstance(answer, Path):
            return answer
        raise answer

    monkeypatch.setattr("platformdirs.user_cache_path", of_no_user)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = files.user_cache()
    assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (tmp_path, 0o700)
    assert files.from_cache("kind", {}) == {}
    assert files.to_cache("kind", {"a": 1}, {"b": 2}).is_relative_to(folder)


def test_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    """Libraries for virtual GPUs are loaded from there."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: Path("~/.cache/ptdbench"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        files.user_cache()
    assert files.from_cache("kind", {}) == {}
