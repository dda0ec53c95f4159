"""Reads tables of shared libraries (64-bit ELF, little endian) without loading them; layouts as in ``elf(5)``."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Fields of Elf64_Shdr that are needed: name, type, offset, size and link; and of Elf64_Sym: name, info, shndx.
_SECTION, _SYMBOL = struct.Struct("<II8x8xQQI20x"), struct.Struct("<IBxH16x")

_SHT_DYNSYM, _SHN_UNDEF = 11, 0


def undefined(library: Path) -> set[str]:
    """Return the names that a library expects others to define.

    Raises:
        OSError: The library cannot be read.
        ValueError: The file is not such a library.
    """
    return {name for name, section in _symbols(library) if section == _SHN_UNDEF and name}


def defined(library: Path) -> set[str]:
    """Return the names that a library defines for others; raises as :func:`undefined`."""
    return {name for name, section in _symbols(library) if section != _SHN_UNDEF and name}


def texts(library: Path, pattern: bytes) -> set[str]:
    """Return a library's string constants that match: names that it looks up. Raises as :func:`undefined`."""
    whole = re.compile(rb"(?<=\0)(?:" + pattern + rb")(?=\0)")
    with _mapped(library) as data:
        sections = _sections(data)
        names = sections[struct.unpack_from("<H", data, 62)[0]]  # e_shstrndx
        found: set[str] = set()
        for name, _, offset, size, _ in sections:
            if _text(data, names[2] + name) == b".rodata":
                found |= {match.group().decode() for match in whole.finditer(data, max(offset - 1, 0), offset + size)}
        return found


def _symbols(library: Path) -> Iterator[tuple[str, int]]:
    """Yield each dynamic symbol and the section that defines it."""
    with _mapped(library) as data:
        sections = _sections(data)
        for _, kind, offset, size, link in sections:
            if kind == _SHT_DYNSYM:
                names = sections[link][2]
                for name, _, section in _SYMBOL.iter_unpack(data[offset : offset + size]):
                    yield _text(data, names + name).decode(), section


def _sections(data: mmap.mmap) -> list[tuple[int, int, int, int, int]]:
    (start,) = struct.unpack_from("<Q", data, 40)  # e_shoff
    size, count = struct.unpack_from("<HH", data, 58)  # e_shentsize, e_shnum
    return [_SECTION.unpack_from(data, start + size * i) for i in range(count)]


def _text(data: mmap.mmap, at: int) -> bytes:
    return data[at : data.find(b"\0", at)]


@contextmanager
def _mapped(library: Path) -> Iterator[mmap.mmap]:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{library} is not a 64-bit ELF library")
        yield data
