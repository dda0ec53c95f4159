"""Files that are written whole, and errors that name what was to be written."""

import errno
from pathlib import Path

import pytest

from ptdbench import files


def test_on_a_file_system_that_is_read_only_an_error_names_the_file_and_not_its_temporary_name(tmp_path, monkeypatch):
    """Simulated: there even the removal of a file that is not there fails, and nobody but root can mount one."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        files.replace_bytes(tmp_path / "report.html", b"")
    assert caught.value.filename == str(tmp_path / "report.html")
