import json
import os
import re
import sysconfig
from pathlib import Path

import pytest

from ptdbench.data.corpus import Malformed, Part, blocks, byte_tokens, files_at, identity, split, standard_library
from tests.data.made import problem_of


def text_of(files):
    return b"".join(piece.tokens.tobytes() for piece in byte_tokens(Part(files)))


def names(part):
    return [document.name for document in part]


def jsonl(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"bee")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"zed")
    return tmp_path


def test_documents_are_joined_in_path_order(folder):
    files = files_at(folder)
    assert text_of(files) == b"zed\0bee\0"
    assert names(Part(files)) == ["a/z.txt", "b.txt"]
    assert names(Part(files_at(folder / "a" / "z.txt"))) == ["z.txt"]
    assert [piece.bytes for piece in byte_tokens(Part(files))] == [4, 4]


@pytest.fixture
def small_blocks(monkeypatch):
    """Of eight bytes."""
    monkeypatch.setattr("ptdbench.data.corpus._BLOCK_BYTES", 8)


@pytest.mark.parametrize(("text", "expected"), [
    (b"ab\ncd\nefghijkl\n", [b"ab\ncd\n", b"efghijk", b"l\n"]),  # lines, and none that fits
    (b"0123456789", [b"0123456", b"789"]),
    ("äöüßéè".encode(), ["äöü".encode(), "ßéè".encode()]),
    ("a🙂b🙂".encode(), ["a🙂b".encode(), "🙂".encode()]),
    (b"exactly\n" * 2, [b"exactly\n", b"exactly\n"]),
    (b"\x80" * 20, [b"\x80" * 8, b"\x80" * 8, b"\x80" * 4]),  # no UTF-8
])  # fmt: skip
def test_long_documents_are_cut_at_lines(tmp_path, small_blocks, text, expected):
    (tmp_path / "long.txt").write_bytes(text)
    text_blocks = list(blocks(Part(files_at(tmp_path))))
    assert [block.text for block in text_blocks] == expected
    assert [block.is_last for block in text_blocks] == [False] * (len(expected) - 1) + [True]
    assert text_of(files_at(tmp_path)) == text + b"\0"


class TestJsonl:
    def test_every_line_is_a_document(self, tmp_path):
        jsonl(tmp_path / "b.jsonl", "one\ntwo", "drei ß", "")
        (tmp_path / "a.txt").write_text("zero")
        assert text_of(files_at(tmp_path)) == "zero\0one\ntwo\0drei ß\0".encode()
        assert names(Part(files_at(tmp_path))) == ["a.txt", "b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]

    def test_blank_lines_are_none_but_count(self, tmp_path):
        (tmp_path / "A.JSONL").write_bytes(b'{"text": "a"}\n\n  \r\n{"id": 1, "text": "b"}')
        assert text_of(files_at(tmp_path)) == b"a\0b\0"
        assert names(Part(files_at(tmp_path))) == ["A.JSONL:1", "A.JSONL:4"]

    def test_what_is_no_utf8_is_replaced(self, tmp_path):
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n{"text": "\\ud800"}\n')
        assert text_of(files_at(tmp_path)) == b"\xef\xbf\xbd\0?\0"

    @pytest.mark.parametrize("line", ["text", '{"text": 1}', '{"text": null}', '{"texts": "a"}', '["text"]', '"text"'])
    def test_malformed_line_is_named(self, tmp_path, line):
        file = jsonl(tmp_path / "a.jsonl", "fine")
        file.write_text(file.read_text() + line)
        with pytest.raises(Malformed, match=f"^{re.escape(str(file))}, line 2: "):
            text_of(files_at(file))


def test_long_lines_of_jsonl_are_cut_and_sizes_sum_to_those_of_the_files(tmp_path, small_blocks):
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 3)
    jsonl(tmp_path / "b.jsonl", "ab\ncdefghij", 'quotes " take \n more')
    files = files_at(tmp_path)
    texts = [block.text for block in blocks(Part(files))]
    assert texts[5:8] == [b"ab\n", b"cdefghi", b"j"]  # a long line is cut like a file
    assert sum(document.size for document in Part(files)) == sum(file.size for file in files)


class TestSplit:
    @pytest.fixture
    def many(self, tmp_path):
        jsonl(tmp_path / "a.jsonl", *(str(number) for number in range(400)))
        for number in range(100):
            (tmp_path / f"{number}.txt").write_text("x")
        return tmp_path

    def test_split_keeps_order_and_a_larger_share_includes_a_smaller(self, many):
        training, held_out = map(names, split(files_at(many), 0.2))
        everything = names(Part(files_at(many)))
        assert len(everything) == 500
        assert sorted(training + held_out) == sorted(everything)
        assert training == [name for name in everything if name not in set(held_out)]
        assert 50 <= len(held_out) <= 150  # mean 100, standard deviation 9
        small, large = (set(names(split(files_at(many), share)[1])) for share in (0.1, 0.3))
        assert small < large

    def test_split_is_stable_under_changes_of_others(self, many, tmp_path_factory):
        before = set(names(split(files_at(many), 0.2)[1]))
        with (many / "a.jsonl").open("a") as stream:
            stream.write('{"text": "new"}\n' * 100)
        (many / "7.txt").unlink()
        for number in range(10, 20):
            (many / f"{number}.txt").write_text("another text")
        moved = many.rename(tmp_path_factory.mktemp("elsewhere") / "deep")
        training, held_out = (set(names(part)) for part in split(files_at(moved), 0.2))
        assert before - {"7.txt"} <= held_out
        assert len(held_out) > len(before), "of the new ones some are kept too"
        assert not before & training

    @pytest.mark.parametrize("share", [1e-30, 0.5, 1 - 1e-12])
    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_neither_part_is_ever_empty(self, tmp_path, share, count):
        files = files_at(jsonl(tmp_path / "a.jsonl", *"x" * count))
        training, held_out = map(names, split(files, share))
        assert len(training) + len(held_out) == count
        assert training
        assert held_out
        if share != 0.5:
            assert min(len(training), len(held_out)) == 1

    @pytest.mark.parametrize("lines", [[], ["one"]])
    def test_a_single_document_cannot_be_divided(self, tmp_path, lines):
        file = jsonl(tmp_path / "a.jsonl", *lines)
        file.open("a").write("\n")
        problem = problem_of(lambda: split(files_at(file), 0.2))
        assert (problem.option, problem.value) == ("held_out", 0.2)
        assert ".jsonl" in problem.remedy


def test_only_readable_files_are_listed(folder):
    (folder / ".hidden").write_bytes(b"no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"no")
    (folder / "empty.txt").touch()
    (folder / "broken").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    assert [file.name for file in files_at(folder)] == ["a/z.txt", "b.txt"]
    assert text_of(files_at(folder / ".git")) == b"no\0"  # unless it is asked for
    (folder / "none").mkdir()
    assert files_at(folder / "none") == []


def test_links_are_followed_without_cycles(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "c.txt").write_bytes(b"sea")
    (other / "back").symlink_to(folder)
    (folder / "a" / "there").symlink_to(other)
    assert [file.name for file in files_at(folder)] == ["a/there/c.txt", "a/z.txt", "b.txt"]


def test_unreadable_folder_is_an_error(folder, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # a mode of 000 would not stop root, whom CI often runs as
    with pytest.raises(PermissionError):
        files_at(folder)


def test_identity_changes_with_size_time_or_name(folder):
    seen = [identity(files_at(folder)) for _ in range(2)]
    file = folder / "b.txt"
    modified = file.stat().st_mtime_ns
    for change in (
        lambda: (file.write_bytes(b"beer"), os.utime(file, ns=(modified, modified))),
        lambda: os.utime(file, ns=(modified + 1, modified + 1)),
        lambda: file.rename(folder / "c.txt"),
    ):
        change()
        seen.append(identity(files_at(folder)))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


def test_standard_library_excludes_tests_and_packages():
    root = Path(sysconfig.get_path("stdlib")).resolve()
    names = {file.path.relative_to(root).as_posix() for file in standard_library()}
    assert names == {file.name for file in standard_library()}
    assert {"os.py", "argparse.py", "json/decoder.py"} <= names
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"site-packages", "test", "tests"} & set(name.split("/"))]
    assert sum(file.size for file in standard_library()) > 5_000_000
