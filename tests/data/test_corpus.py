import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from ptdbench.data.corpus import byte_tokens, documents_at, identity, standard_library, token_count


def text_of(documents):
    return np.concatenate(list(byte_tokens(documents))).tobytes()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"bee")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"zed")
    return tmp_path


def test_documents_are_joined_in_order_of_their_paths(folder):
    documents = documents_at(folder)
    assert text_of(documents) == b"zed\0bee\0"
    assert token_count(documents) == 8


def test_bytes_that_are_not_utf8_pass_unchanged(tmp_path):
    everything = bytes(range(255, 0, -1))
    (tmp_path / "latin.txt").write_bytes(everything)
    assert text_of(documents_at(tmp_path / "latin.txt")) == everything + b"\0"


def test_a_document_larger_than_a_block_arrives_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("ptdbench.data.corpus._BLOCK_BYTES", 4)
    (tmp_path / "long.txt").write_bytes(b"0123456789")
    pieces = list(byte_tokens(documents_at(tmp_path)))
    assert [piece.size for piece in pieces] == [4, 4, 2, 1]
    assert b"".join(piece.tobytes() for piece in pieces) == b"0123456789\0"


def test_hidden_and_empty_files_broken_links_and_pipes_are_left_out(folder):
    (folder / ".hidden").write_bytes(b"no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"no")
    (folder / "empty.txt").touch()
    (folder / "broken").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    assert text_of(documents_at(folder)) == b"zed\0bee\0"


def test_a_hidden_folder_that_is_asked_for_is_read(tmp_path):
    hidden = tmp_path / ".notes"
    hidden.mkdir()
    (hidden / "a.txt").write_bytes(b"yes")
    assert text_of(documents_at(hidden)) == b"yes\0"


def test_an_empty_folder_has_no_documents(tmp_path):
    assert documents_at(tmp_path) == []


def test_a_folder_that_cannot_be_listed_is_an_error_not_a_gap(folder, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # a mode of 000 would not stop root, whom CI often runs as
    with pytest.raises(PermissionError):
        documents_at(folder)


def test_identity_is_stable_until_a_document_changes(folder):
    before = identity(documents_at(folder))
    assert identity(documents_at(folder)) == before
    seen = {before}

    file = folder / "b.txt"
    modified = file.stat().st_mtime_ns
    file.write_bytes(b"beer")
    os.utime(file, ns=(modified, modified))
    seen.add(identity(documents_at(folder)))

    os.utime(file, ns=(modified + 1, modified + 1))
    seen.add(identity(documents_at(folder)))

    file.rename(folder / "c.txt")
    seen.add(identity(documents_at(folder)))

    assert len(seen) == 4, "size, time and name each make a new identity"


def test_standard_library_is_python_without_tests_and_installed_packages():
    root = Path(sysconfig.get_path("stdlib")).resolve()
    found = {document.path.relative_to(root).as_posix() for document in standard_library()}
    assert {"os.py", "argparse.py", "json/decoder.py"} <= found
    assert all(name.endswith(".py") for name in found)
    assert not [name for name in found if {"site-packages", "test", "tests"} & set(name.split("/"))]
    assert token_count(standard_library()) > 5_000_000
