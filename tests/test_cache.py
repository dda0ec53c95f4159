"""The folder of the cache, also of a user without a home."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from ptdbench import cache


@pytest.mark.parametrize("answer", [RuntimeError("could not determine the home directory"), Path("~/.cache/ptdbench")])
def test_cache_without_a_home_is_a_private_temporary_folder(tmp_path, monkeypatch, answer):
    def of_no_user(_: str) -> Path:
        if isinstance(answer, Path):
            return answer
        raise answer

    monkeypatch.setattr(cache, "user_cache_path", of_no_user)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache.user_cache()
    assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (tmp_path, 0o700)
    assert cache.look_up("kind", {}) == {}
    assert cache.keep("kind", {"a": 1}, {"b": 2}).is_relative_to(folder)


def test_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    """Libraries for virtual GPUs are loaded from there."""
    monkeypatch.setattr(cache, "user_cache_path", lambda _: Path("~/.cache/ptdbench"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache.user_cache()
    assert cache.look_up("kind", {}) == {}
