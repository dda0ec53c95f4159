from pathlib import Path

import pytest

from ptdbench.cache import user_cache


def test_lies_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "ptdbench"
    assert not user_cache().exists(), "asking for it makes nothing"


@pytest.mark.parametrize("unset", [lambda m: m.delenv("XDG_CACHE_HOME"), lambda m: m.setenv("XDG_CACHE_HOME", "")])
def test_without_a_choice_or_with_an_empty_one_it_lies_in_the_home_folder(monkeypatch, tmp_path, unset):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    unset(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == Path(tmp_path, ".cache", "ptdbench")
