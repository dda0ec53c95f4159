"""Files that are written whole, and errors that name what was to be written."""

import errno
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


@pytest.mark.parametrize(("free", "said"), [(4096, "[Errno 28] No space left on device: {folder!r}"), (1 << 30, None)])
def test_full_disk_is_found_behind_a_librarys_error(tmp_path, monkeypatch, free, said):
    """Simulated: Kineto leaves out the file, and the reader does not find it."""
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    lack = files.lack_of_space(FileNotFoundError(errno.ENOENT, "trace.json"), tmp_path)
    assert (str(lack) if lack else None) == (said and said.format(folder=str(tmp_path)))
