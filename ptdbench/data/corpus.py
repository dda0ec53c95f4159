"""Text on disk: its files and documents, their identity and bytes; and tokens, by a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ptdbench.data.tokens import TokenChunk
from ptdbench.problems import ConfigError, Problem, try_these
from ptdbench.terminal import echo

SEPARATOR = b"\0"  # ends every document that is read as bytes; not part of text

# A document may be larger than memory. A tokenizer processes one block per core at a time and takes some 60 bytes of
# memory per byte of text: larger blocks would leave cores idle and fill memory.
_BLOCK_BYTES = 1 << 18
_PLACES = 1 << 64
# Installed packages differ between machines, and tests are not typical code.
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class File(NamedTuple):
    """A file of the corpus as it was when the corpus was listed."""

    path: Path
    name: str  # relative to the root, with slashes; independent of the location of the corpus
    size: int  # bytes
    modified: int  # nanoseconds since the epoch


class Document(NamedTuple):
    """One text of the corpus: a file, or a line of a ``.jsonl`` file."""

    name: str  # of its file, with the line number if it is a line
    size: int  # bytes on disk
    read: Callable[[], Iterator[bytes]]  # returns the text in pieces of at most _BLOCK_BYTES

    @property
    def place(self) -> int:
        """A pseudo-random position between 0 and 2^64 that depends only on the name, not on other documents."""
        name = self.name.encode(errors="surrogateescape")
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


class TextBlock(NamedTuple):
    """A block of a document, up to the end of a line if possible."""

    text: bytes
    is_last: bool  # whether it is the last block of its document


class Malformed(ValueError):
    """A malformed file; the message names the file and the line."""


@dataclass(frozen=True)
class Part:
    """The documents of some files whose place is at least ``start`` and below ``stop``; by default all.

    Each iteration reads ``.jsonl`` files again, line by line, and may raise OSError; other files are not opened.
    """

    files: Sequence[File]
    start: int = 0
    stop: int = _PLACES

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents in the order of their files and lines."""
        everything = self.start == 0 and self.stop == _PLACES  # no need to hash names
        for document in _documents(self.files):
            if everything or self.start <= document.place < self.stop:
                yield document


def standard_library() -> list[File]:
    """Return the Python sources of this program's standard library; empty if only bytecode is installed."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    return _files(root, _walk(root, without=_NOT_THE_LIBRARY, suffix=".py"))


def files_at(root: Path) -> list[File]:
    """Return the file ``root``, or all files below the folder that are neither hidden nor empty; may raise OSError."""
    return _files(root, _walk(root)) if root.is_dir() else _files(root.parent, [root])


def identity(files: Iterable[File]) -> str:
    """Return a digest that changes with the path, size or modification time of any file, or their order."""
    listing = [(str(file.path), file.size, file.modified) for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def split(files: Sequence[File], share: float) -> tuple[Part, Part]:
    """Split the documents of files into training and held-out parts; hold out about ``share`` of them.

    The assignment depends only on a document's name, so it does not change when others are added or removed, unless
    one must be reassigned because a part would be empty.

    Raises:
        ConfigError: There are fewer than two documents; the option is ``held_out``.
        OSError: A ``.jsonl`` file cannot be read.
    """
    places = np.fromiter((document.place for document in Part(files)), np.uint64)
    if places.size < 2:
        rule = "the text is a single document, which cannot be split"
        remedy = "try 0, or a folder of several files (split -l 1000 splits a file), or a .jsonl file of several lines"
        raise ConfigError([Problem("held_out", share, rule, remedy)])
    cut = min(max(int(share * _PLACES), int(places.min()) + 1), int(places.max()))
    return Part(files, start=cut), Part(files, stop=cut)


def blocks(documents: Iterable[Document]) -> Iterator[TextBlock]:
    """Yield the text of all documents in order; a document without text has no block.

    Raises:
        OSError: A file cannot be read.
        Malformed: A line of a ``.jsonl`` file is not an object with a text.
    """
    for document in documents:
        for text, following in pairwise(chain(document.read(), [b""])):  # blocks are never empty: b"" marks the end
            yield TextBlock(text, is_last=not following)


def byte_tokens(documents: Iterable[Document]) -> Iterator[TokenChunk]:
    """Yield the bytes of all documents, each followed by :data:`SEPARATOR`, as uint8; raise like :func:`blocks`."""
    for block in blocks(documents):
        text = block.text + SEPARATOR if block.is_last else block.text
        yield TokenChunk(np.frombuffer(text, np.uint8), len(text))


def _documents(files: Iterable[File]) -> Iterator[Document]:
    for file in files:
        if file.path.suffix.lower() == ".jsonl":
            with file.path.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        text = partial(_read_line, file.path, number, line)
                        yield Document(f"{file.name}:{number}", len(line), text)
        else:
            yield Document(file.name, file.size, partial(_read_file, file.path))


def _read_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield from _cut(stream)


def _read_line(path: Path, number: int, line: bytes) -> Iterator[bytes]:
    try:
        text = json.loads(line.decode(errors="replace"))["text"].encode(errors="replace")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Malformed(f'{path}, line {number}: not a JSON object with a string "text"') from None
    yield from _cut(io.BytesIO(text))


def _cut(stream: BinaryIO) -> Iterator[bytes]:
    """Split a stream into non-empty blocks of at most :data:`_BLOCK_BYTES`."""
    rest = b""
    while read := stream.read(_BLOCK_BYTES - len(rest)):
        block = rest + read
        end = _block_end(block) if len(block) == _BLOCK_BYTES else len(block)
        yield block[:end]
        rest = block[end:]
    if rest:
        yield rest


def _block_end(block: bytes) -> int:
    """Return where to end a block: after its last line, or else not within a UTF-8 character."""
    if after_line := block.rfind(b"\n") + 1:
        return after_line
    last = next((at for at in range(len(block) - 1, max(len(block) - 5, 0), -1) if block[at] & 0xC0 != 0x80), 0)
    return last or len(block)  # before the last character; at the end if this is not UTF-8


def _files(root: Path, paths: Iterable[Path]) -> list[File]:
    """Return the non-empty files among ``paths``, in an order that does not depend on the file system."""
    files = []
    for path in paths:
        if path.is_file():  # skip broken links and pipes, which would never end
            status = path.stat()
            files.append(File(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return sorted(file for file in files if file.size > 0)


def _walk(
    root: Path, without: frozenset[str] = frozenset(), suffix: str = "", above: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """Yield every file with that suffix below ``root``, except hidden files and those in folders ``without``.

    Links to folders are followed, except to folders ``above``: such a cycle would never end.
    """
    above |= {root.resolve()}
    for entry in os.scandir(root):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            if entry.name.endswith(suffix):
                yield path
        elif entry.name not in without and path.resolve() not in above:
            yield from _walk(path, without, suffix, above)


# Bytes to encode at once: enough blocks for some dozens of cores, and a few hundred MB of memory.
_BATCH_BYTES = 1 << 23
# Say so only from this size on, which takes a second or two.
_PROGRESS_BYTES = 4_000_000
#: Names of the token that ends a document.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


class Tokenizer:
    """A tokenizer from a ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        """Read the file; raise ConfigError for ``tokenizer`` if it does not exist or is not a tokenizer."""
        import tokenizers

        content = _content(path)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing more specific
            rule = f"is not a Hugging Face tokenizer.json: {error}"
            raise ConfigError([Problem("tokenizer", path, rule)]) from None
        self._tokenizer.no_truncation()  # a file may truncate to 512 tokens, which would lose text
        self._tokenizer.no_padding()
        self.digest = hashlib.sha256(content).hexdigest()  #: SHA-256 of the file, in hexadecimal digits.
        #: Size of the vocabulary: the largest token id plus one, as ids may have gaps.
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        #: The smallest unsigned integer type that holds all tokens: 16 or 32 bits.
        self.dtype = np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)
        ends: list[int | None] = [self._tokenizer.token_to_id(token) for token in _ENDS]
        #: The token that ends every document; ``None`` if the tokenizer has none.
        self.end = next((end for end in ends if end is not None), None)

    def pieces(self, documents: Part, name: str) -> Iterator[TokenChunk]:
        """Yield the tokens of all documents in order; say so on standard error if it takes long.

        Documents are split into blocks, usually at the end of a line, which are tokenized separately. Invalid UTF-8
        becomes the replacement character.

        Raises:
            OSError, Malformed: As for :func:`ptdbench.data.corpus.blocks`.
        """
        with _said(name, sum(document.size for document in documents)):
            for batch in _batches(blocks(documents)):
                yield TokenChunk(self._tokens(batch), sum(len(block.text) for block in batch))

    def _tokens(self, batch: list[TextBlock]) -> np.ndarray[Any, Any]:
        texts = [block.text.decode(errors="replace") for block in batch]
        rows = []
        # Uses all cores, and skips the unused offsets.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for encoding, block in zip(encodings, batch, strict=True):
            rows.append(np.array(encoding.ids, self.dtype))
            if block.is_last and self.end is not None:
                rows.append(np.array([self.end], self.dtype))
        return np.concatenate(rows)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except IsADirectoryError:
        inside = path / "tokenizer.json"
        rule, remedy = "is a folder", try_these([inside] if inside.is_file() else [])
    except OSError as error:
        rule, remedy = str(error), "give the path of a tokenizer.json, not the name of a model"
    raise ConfigError([Problem("tokenizer", path, rule, remedy)])


def _batches(every: Iterable[TextBlock]) -> Iterator[list[TextBlock]]:
    """Collect blocks into lists of about :data:`_BATCH_BYTES`."""
    batch: list[TextBlock] = []
    size = 0
    for block in every:
        batch.append(block)
        size += len(block.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _said(name: str, total: int) -> Iterator[None]:
    """Print a line at the start and at the end of tokenizing ``total`` bytes, if they are many."""
    if total < _PROGRESS_BYTES:
        yield
        return
    echo(f"tokenizing {name} ({total / 1e6:,.0f} MB)", sys.stderr)
    start = perf_counter()
    yield
    seconds = perf_counter() - start
    echo(f"tokenized {name} in {seconds:,.0f} s ({total / 1e6 / seconds:,.1f} MB/s)", sys.stderr)
