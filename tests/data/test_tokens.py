"""Nothing here imports torch: the children that the tests start must come up fast."""

import hashlib
import multiprocessing
import signal

import numpy as np
import pytest

from ptdbench.data.corpus import TokenChunk, cached_tokens, read_tokens
from tests.data.made import at_once

TEXT = np.frombuffer(b"the quick brown fox", np.uint8)


def piece(tokens):
    return TokenChunk(tokens, 3 * tokens.size)  # as if each stood for three bytes


def one_piece():
    return [piece(TEXT)]


def never():
    pytest.fail("a trusted file was written again")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "text-0.1.tokens"


def test_tokens_are_written_once(path):
    first = cached_tokens(path, np.uint8, lambda: [piece(TEXT[:4]), piece(TEXT[4:])])
    again = cached_tokens(path, np.uint8, never)
    assert first.tokens.tobytes() == again.tokens.tobytes() == b"the quick brown fox"
    assert isinstance(again.tokens, np.memmap)
    assert not again.tokens.flags.writeable
    assert first.bytes == again.bytes == 3 * 19
    assert first.digest == again.digest == hashlib.sha256(b"the quick brown fox").hexdigest()


def test_the_format(path):
    cached_tokens(path, np.uint16, lambda: [TokenChunk(np.array([1, 50256], np.uint16), 9)])
    assert path.read_bytes() == b"\x01\x00\x50\xc4"
    assert read_tokens(path, np.uint8) is None
    assert {file.name for file in path.parent.iterdir()} == {
        "text-0.1.tokens", "text-0.1.json", "text-0.1.tokens.lock"
    }  # fmt: skip


def test_no_tokens_and_large_ones(path):
    assert cached_tokens(path, np.uint8, list).tokens.size == 0
    with pytest.raises(TypeError, match="uint16"):
        cached_tokens(path.with_name("b.tokens"), np.uint8, lambda: [piece(np.array([50256], np.uint16))])
    assert not path.with_name("b.tokens").exists()


@pytest.mark.parametrize(
    ("end", "damage"),
    [
        (".tokens", lambda content: content[:-1]),
        (".tokens", lambda content: b"x" * 4096 + content),
        (".json", lambda content: content[:-9]),
        (".json", lambda content: b"{}"),
    ],
)
def test_damaged_file_is_rebuilt(path, end, damage):
    cached_tokens(path, np.uint8, one_piece)
    file = path.with_suffix(end)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert read_tokens(path, np.uint8) is None
    assert cached_tokens(path, np.uint8, one_piece).tokens.tobytes() == TEXT.tobytes()
    assert file.read_bytes() == whole


def stall(path, writing):
    def pieces():
        yield piece(np.zeros(1 << 20, np.uint8))  # more than any buffer holds back
        writing.set()
        signal.pause()

    cached_tokens(path, np.uint8, pieces)


def test_killed_writer_leaves_nothing_trusted(path):
    context = multiprocessing.get_context("fork")  # others import torch anew
    writing = context.Event()
    writer = context.Process(target=stall, args=(path, writing))
    writer.start()
    assert writing.wait(60)
    writer.kill()
    writer.join()

    (partial,) = path.parent.glob("*.partial")
    assert partial.stat().st_size >= 1 << 20
    assert read_tokens(path, np.uint8) is None
    assert cached_tokens(path, np.uint8, one_piece).tokens.tobytes() == TEXT.tobytes()
    assert not partial.exists()


def test_one_of_several_processes_writes(path, tmp_path):
    def build(note):
        tokens = cached_tokens(path, np.uint8, lambda: note() or one_piece()).tokens
        assert tokens.tobytes() == TEXT.tobytes()

    assert at_once(3, build, tmp_path / "log") == 1
