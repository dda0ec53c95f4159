"""Text on disk: its files and documents, their bytes, tokens by a Hugging Face tokenizer, and the store of these.

A stored file of tokens is mapped into memory instead of read: little-endian unsigned integers, and nothing else. A
second file, ``.json``, describes them: their number and dtype, the bytes of text that they represent, and their digest.
It is written last, after the tokens have reached the disk, so that half-written files are never trained on.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from filelock import FileLock

from ptdbench.files import write_json
from ptdbench.problems import ConfigError, Problem, try_these

Tokens = npt.NDArray[np.unsignedinteger[Any]]

SEPARATOR = b"\0"  # ends every document that is read as bytes; not part of text

# A document may be larger than memory. A tokenizer uses all cores for a batch, each for a block at a time, and takes
# some 60 bytes of memory per byte of text.
_BLOCK_BYTES, _BATCH = 1 << 17, 64

# Installed packages differ between machines, and tests are not typical code.
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class File(NamedTuple):
    """A file of the corpus as it was when the corpus was listed."""

    path: Path
    name: str  # relative to the root, with slashes; independent of the location of the corpus
    size: int  # bytes
    modified: int  # nanoseconds since the epoch


class Document(NamedTuple):
    """One text of the corpus: a file, or a line of a ``.jsonl`` file."""

    name: str  # of its file, with the line number if it is a line
    blocks: Iterator[bytes]  # the text in blocks of whole lines, to be read before the next document

    @property
    def place(self) -> float:
        """A pseudo-random number from 0 to 1 that depends only on the name, not on other documents."""
        name = self.name.encode(errors="surrogateescape")
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64


class TokenChunk(NamedTuple):
    """Some of the tokens to store."""

    tokens: Tokens  # shape (count,)
    bytes: int  # of text that they represent


class Stored(NamedTuple):
    """A token file."""

    tokens: Tokens  # all of them, shape (count,), mapped read-only
    bytes: int  # of text that they represent
    digest: str  # SHA-256 of the tokens as stored in the file, in hexadecimal digits


class Malformed(ValueError):
    """A malformed file; the message names the file and the line."""


def standard_library() -> list[File]:
    """Return the Python sources of this program's standard library; empty if only bytecode is installed."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    return _files(root, (path for path in _walk(root, _NOT_THE_LIBRARY) if path.suffix == ".py"))


def files_at(root: Path) -> list[File]:
    """Return the file ``root``, or all files below the folder that are neither hidden nor empty; may raise OSError.

    Links to folders are not followed: they may lead back.
    """
    return _files(root, _walk(root)) if root.is_dir() else _files(root.parent, [root])


def identity(files: Iterable[File]) -> str:
    """Return a digest that changes with the path, size or modification time of any file, or their order."""
    listing = [(str(file.path), file.size, file.modified) for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def documents(files: Iterable[File]) -> Iterator[Document]:
    """Yield the documents that have text, in the order of their files and lines.

    Raises:
        OSError: A file cannot be read.
        Malformed: A line of a ``.jsonl`` file is not an object with a text.
    """
    for file in files:
        with file.path.open("rb") as stream:
            if file.path.suffix.lower() != ".jsonl":
                read = stream.readlines
                yield Document(file.name, iter(lambda: b"".join(read(_BLOCK_BYTES)), b""))  # noqa: B023 - read at once
                continue
            for number, line in enumerate(stream, 1):
                if line.strip() and (text := _text_of(line, f"{file.path}, line {number}")):
                    yield Document(f"{file.name}:{number}", iter([text]))


def part(files: Sequence[File], share: float, *, held_out: bool) -> Iterator[Document]:
    """Yield the documents of one part: about ``share`` of them are held out.

    The assignment depends only on a document's name, so it does not change when others are added or removed. Raises
    like :func:`documents`.
    """
    return (document for document in documents(files) if (document.place < share) == held_out)


def blocks(documents: Iterable[Document]) -> Iterator[bytes]:
    """Yield the text of all documents in order, and an empty block after each; raise like :func:`documents`."""
    for document in documents:
        yield from document.blocks
        yield b""


def byte_tokens(documents: Iterable[Document]) -> Iterator[TokenChunk]:
    """Yield the bytes of all documents, each followed by :data:`SEPARATOR`, as uint8; raise like :func:`documents`."""
    for block in blocks(documents):
        text = block or SEPARATOR
        yield TokenChunk(np.frombuffer(text, np.uint8), len(text))


def _text_of(line: bytes, place: str) -> bytes:
    try:
        text: str = json.loads(line.decode(errors="replace"))["text"]
        return text.encode(errors="replace")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Malformed(f'{place}: not a JSON object with a string "text"') from None


def _files(root: Path, paths: Iterable[Path]) -> list[File]:
    """Return the non-empty files among ``paths``, in an order that does not depend on the file system."""
    files = []
    for path in paths:
        if path.is_file():  # skip broken links and pipes, which would never end
            status = path.stat()
            files.append(File(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return sorted(file for file in files if file.size > 0)


def _walk(root: Path, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield every file below ``root``, except hidden files and those in folders ``without``; may raise OSError."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


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

    def tokens(self, documents: Iterable[Document]) -> Iterator[TokenChunk]:
        """Yield the tokens of all documents in order; raise like :func:`documents`.

        Blocks of a long document are tokenized separately. Invalid UTF-8 becomes the replacement character.
        """
        end = [] if self.end is None else [self.end]
        waiting = blocks(documents)
        while batch := list(islice(waiting, _BATCH)):
            texts = [block.decode(errors="replace") for block in batch]
            # Uses all cores, and skips the unused offsets.
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            rows = [encoding.ids if block else end for encoding, block in zip(encodings, batch, strict=True)]
            yield TokenChunk(np.concatenate([np.array(row, self.dtype) for row in rows]), sum(map(len, batch)))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except IsADirectoryError:
        inside = path / "tokenizer.json"
        rule, remedy = "is a folder", try_these([inside] if inside.is_file() else [])
    except OSError as error:
        rule, remedy = str(error), "give the path of a tokenizer.json, not the name of a model"
    raise ConfigError([Problem("tokenizer", path, rule, remedy)])


class _Description(msgspec.Struct):
    """The content of the second file of a store."""

    dtype: str
    count: int
    bytes: int
    digest: str


def cached_tokens(path: Path, dtype: npt.DTypeLike, pieces: Callable[[], Iterable[TokenChunk]]) -> Stored:
    """Map the tokens at ``path``; if there are none, one process writes them and others wait.

    The name of the file must say what the tokens were made from. The folder is created if necessary, with a lock file
    next to the file. ``pieces`` is called only by the process that writes.

    Raises:
        OSError: The folder cannot be written or locked, or the disk is full.
    """
    if stored := read_tokens(path, dtype):
        return stored
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False):
        # Another process may have written the file meanwhile.
        if not read_tokens(path, dtype):
            _write_tokens(path, dtype, pieces())
    stored = read_tokens(path, dtype)
    assert stored, f"{path} vanished or changed right after it was written"
    return stored


def read_tokens(path: Path, dtype: npt.DTypeLike) -> Stored | None:
    """Map the tokens at ``path``; ``None`` unless they are complete, and of this type."""
    dtype = _on_disk(dtype)
    try:
        description = msgspec.json.decode(_second(path).read_bytes(), type=_Description)
        size = path.stat().st_size
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    if (description.dtype, description.count * dtype.itemsize) != (dtype.str, size):
        return None
    tokens = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
    return Stored(tokens, description.bytes, description.digest)


def _write_tokens(path: Path, dtype: npt.DTypeLike, pieces: Iterable[TokenChunk]) -> None:
    """Write tokens and their description.

    The caller holds the lock, which may not exclude other hosts of a network file system: the name of the unfinished
    file contains the host's. The next writer on a host overwrites the remains of a killed one.
    """
    dtype = _on_disk(dtype)
    unfinished = path.with_name(f"{path.name}.{platform.node()}.partial")
    description, digest = _Description(dtype.str, 0, 0, ""), hashlib.sha256()
    try:
        with unfinished.open("wb") as file:
            for piece in pieces:
                content = piece.tokens.astype(dtype, casting="safe", copy=False).tobytes()
                file.write(content)
                digest.update(content)
                description.count += piece.tokens.size
                description.bytes += piece.bytes
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    description.digest = digest.hexdigest()
    write_json(_second(path), description)


def _second(path: Path) -> Path:
    return path.with_suffix(".json")


def _on_disk(dtype: npt.DTypeLike) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
