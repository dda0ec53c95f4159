"""Nothing here imports torch: the children that the tests start must come up fast."""

import hashlib
import multiprocessing
import signal

import numpy as np
import pytest

from ptdbench.data.tokens import HEADER_BYTES, TokenChunk, cached_tokens, read_tokens
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
    return tmp_path / "cache" / "text.tokens"


def test_tokens_are_written_once(path):
    first = cached_tokens(path, np.uint8, "id", lambda: [piece(TEXT[:4]), piece(TEXT[4:])])
    again = cached_tokens(path, np.uint8, "id", never)
    assert first.tokens.tobytes() == again.tokens.tobytes() == b"the quick brown fox"
    assert isinstance(again.tokens, np.memmap)
    assert not again.tokens.flags.writeable
    assert first.bytes == again.bytes == 3 * 19
    assert first.digest == again.digest == hashlib.sha256(b"the quick brown fox").hexdigest()


def test_the_format(path):
    cached_tokens(path, np.uint16, "id", lambda: [TokenChunk(np.array([1, 50256], np.uint16), 9)])
    digest = hashlib.sha256(b"\x01\x00\x50\xc4").hexdigest()
    fields = f'{{"dtype": "<u2", "count": 2, "source": "id", "bytes": 9, "digest": "{digest}"}}'
    header = f"ptdbench tokens 2\n{fields}\n".encode()
    assert path.read_bytes() == header.ljust(4096) + b"\x01\x00\x50\xc4"


def test_large_tokens_are_refused(path):
    with pytest.raises(TypeError, match="uint16"):
        cached_tokens(path, np.uint8, "id", lambda: [piece(np.array([50256], np.uint16))])
    assert not path.exists()


@pytest.mark.parametrize("damage", [
    lambda content: content[:-1],
    lambda content: content + b"x",
    lambda content: content[:HEADER_BYTES],
    lambda content: content[:100],
    lambda content: b"",
    lambda content: bytes(HEADER_BYTES) + content[HEADER_BYTES:],  # the header was never written
    lambda content: content.replace(b"tokens 2", b"tokens 1"),
    lambda content: content.replace(b'"bytes": 57', b'"bytes": 057'),
    lambda content: content.replace(b'"bytes": 57', b'"bytes": ??'),
    lambda content: content.replace(b'"digest": "', b'"digest": "x'),
])  # fmt: skip
def test_damaged_file_is_rebuilt(path, damage):
    cached_tokens(path, np.uint8, "id", one_piece)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert read_tokens(path, np.uint8, "id") is None
    assert cached_tokens(path, np.uint8, "id", one_piece).tokens.tobytes() == TEXT.tobytes()
    assert path.read_bytes() == whole


def test_other_source_or_dtype_is_not_trusted(path):
    assert read_tokens(path, np.uint8, "id") is None
    cached_tokens(path, np.uint8, "id", lambda: [piece(TEXT[:4])])
    assert read_tokens(path, np.uint8, "id") is not None
    assert read_tokens(path, np.uint8, "other") is None
    assert read_tokens(path, np.uint16, "id") is None


def test_failed_write_keeps_the_old_file(path):
    def breaks_off():
        yield piece(TEXT[:4])
        raise OSError("disk on fire")

    cached_tokens(path, np.uint8, "old", one_piece)
    with pytest.raises(OSError, match="disk on fire"):
        cached_tokens(path, np.uint8, "new", breaks_off)
    assert read_tokens(path, np.uint8, "old") is not None
    assert {file.name for file in path.parent.iterdir()} == {"text.tokens", "text.tokens.lock"}


@pytest.mark.parametrize("end", ["", ".here.partial"])
@pytest.mark.parametrize("content", [b"my own words", b"\1" * 10_000, None])
def test_foreign_files_are_kept(path, monkeypatch, end, content):
    monkeypatch.setattr("platform.node", lambda: "here")
    place = path.with_name(path.name + end)
    place.parent.mkdir(exist_ok=True)
    mine = place.parent / "mine" if content is None else place
    mine.write_bytes(content or b"linked to")
    if mine != place:
        place.symlink_to(mine)
    with pytest.raises(FileExistsError, match=f"{place.name} was not created by ptdbench: move it elsewhere"):
        cached_tokens(path, np.uint8, "id", one_piece)
    assert mine.read_bytes() == (content or b"linked to")
    assert place.is_symlink() == (content is None)


def stall(path, writing):
    def pieces():
        yield piece(np.zeros(1 << 20, np.uint8))  # more than any buffer holds back
        writing.set()
        signal.pause()

    cached_tokens(path, np.uint8, "id", pieces)


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
    assert read_tokens(path, np.uint8, "id") is None
    assert cached_tokens(path, np.uint8, "id", one_piece).tokens.tobytes() == TEXT.tobytes()
    assert not partial.exists()


def test_one_of_several_processes_writes(path, tmp_path):
    def build(note):
        tokens = cached_tokens(path, np.uint8, "id", lambda: note() or one_piece()).tokens
        assert tokens.tobytes() == TEXT.tobytes()

    assert at_once(3, build, tmp_path / "log") == 1
