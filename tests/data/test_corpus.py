import json
import os
import sysconfig
from pathlib import Path

import pytest

from ptdbench.data.corpus import Malformed, Part, blocks, byte_tokens, files_at, identity, split, standard_library
from ptdbench.problems import ConfigError


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


def test_documents_are_joined_in_order_of_their_paths(folder):
    files = files_at(folder)
    assert text_of(files) == b"zed\0bee\0"
    assert names(Part(files)) == ["a/z.txt", "b.txt"]


def test_a_single_file_bears_its_own_name(folder):
    assert names(Part(files_at(folder / "a" / "z.txt"))) == ["z.txt"]


def test_bytes_that_are_not_utf8_pass_unchanged(tmp_path):
    everything = bytes(range(255, 0, -1))
    (tmp_path / "latin.txt").write_bytes(everything)
    assert text_of(files_at(tmp_path / "latin.txt")) == everything + b"\0"


def test_every_byte_counts_as_text_the_separator_too(folder):
    assert [piece.bytes for piece in byte_tokens(Part(files_at(folder)))] == [4, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("ab\ncd\nefghijkl\n", ["ab\ncd\n", "efghijk", "l\n"], id="lines, and none that fits"),
        pytest.param("0123456789", ["0123456", "789"], id="no line"),
        pytest.param("äöüßéè", ["äöü", "ßéè"], id="characters of two bytes"),
        pytest.param("a🙂b🙂", ["a🙂b", "🙂"], id="characters of four bytes"),
        pytest.param("exactly\n" * 2, ["exactly\n", "exactly\n"], id="lines that fill a block"),
    ],
)
def test_a_document_larger_than_a_block_is_cut_where_it_does_least_harm(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr("ptdbench.data.corpus._BLOCK_BYTES", 8)
    (tmp_path / "long.txt").write_text(text)
    found = list(blocks(Part(files_at(tmp_path))))
    assert [block.text.decode() for block in found] == expected
    assert [block.is_last for block in found] == [False] * (len(expected) - 1) + [True]
    assert text_of(files_at(tmp_path)) == text.encode() + b"\0"


def test_what_is_no_utf8_is_cut_too(tmp_path, monkeypatch):
    monkeypatch.setattr("ptdbench.data.corpus._BLOCK_BYTES", 8)
    (tmp_path / "odd").write_bytes(b"\x80" * 20)
    assert [len(block.text) for block in blocks(Part(files_at(tmp_path)))] == [8, 8, 4]


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
    def test_a_line_that_is_no_object_with_a_text_is_named(self, tmp_path, line):
        file = jsonl(tmp_path / "a.jsonl", "fine")
        with file.open("a") as stream:
            stream.write(line)
        with pytest.raises(Malformed) as caught:
            text_of(files_at(file))
        assert str(caught.value).startswith(f"{file}, line 2: ")

    def test_a_long_line_is_cut_like_a_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr("ptdbench.data.corpus._BLOCK_BYTES", 8)
        file = jsonl(tmp_path / "a.jsonl", "ab\ncdefghij")
        found = list(blocks(Part(files_at(file))))
        assert [block.text for block in found] == [b"ab\n", b"cdefghi", b"j"]
        assert sum(block.size for block in found) == file.stat().st_size


def test_what_is_done_of_a_document_adds_up_to_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr("ptdbench.data.corpus._BLOCK_BYTES", 8)
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 3)
    jsonl(tmp_path / "b.jsonl", "some text", 'quotes " take \n more')
    total = sum(document.size for document in Part(files_at(tmp_path)))
    assert total == sum(file.size for file in files_at(tmp_path))
    assert sum(block.size for block in blocks(Part(files_at(tmp_path)))) == total


class TestSplit:
    @pytest.fixture
    def many(self, tmp_path):
        jsonl(tmp_path / "a.jsonl", *(str(number) for number in range(400)))
        for number in range(100):
            (tmp_path / f"{number}.txt").write_text("x")
        return tmp_path

    def test_every_document_is_in_one_part_in_its_order(self, many):
        training, held_out = map(names, split(files_at(many), 0.2))
        everything = names(Part(files_at(many)))
        assert len(everything) == 500
        assert sorted(training + held_out) == sorted(everything)
        assert training == [name for name in everything if name not in set(held_out)]
        assert 50 <= len(held_out) <= 150  # mean 100, standard deviation 9

    def test_a_larger_share_keeps_what_a_smaller_one_kept(self, many):
        small, large = (set(names(split(files_at(many), share)[1])) for share in (0.1, 0.3))
        assert small < large

    def test_documents_stay_where_they_are_when_others_come_and_go(self, many):
        before = set(names(split(files_at(many), 0.2)[1]))
        with (many / "a.jsonl").open("a") as stream:
            stream.write('{"text": "new"}\n' * 100)
        for number in range(100, 150):
            (many / f"{number}.txt").write_text("x")
        (many / "7.txt").unlink()
        training, held_out = (set(names(part)) for part in split(files_at(many), 0.2))
        assert before - {"7.txt"} <= held_out
        assert len(held_out) > len(before), "of the new ones some are kept too"
        assert not before & training

    def test_depends_on_neither_the_place_nor_the_content(self, many, tmp_path_factory):
        before = names(split(files_at(many), 0.2)[1])
        elsewhere = tmp_path_factory.mktemp("elsewhere") / "deep"
        many.rename(elsewhere)
        (elsewhere / "7.txt").write_text("another text")
        assert names(split(files_at(elsewhere), 0.2)[1]) == before

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
        with pytest.raises(ConfigError) as caught:
            split(files_at(file), 0.2)
        (problem,) = caught.value.problems
        assert (problem.option, problem.value) == ("held_out", 0.2)
        assert ".jsonl" in problem.remedy


def test_hidden_and_empty_files_broken_links_and_pipes_are_left_out(folder):
    (folder / ".hidden").write_bytes(b"no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"no")
    (folder / "empty.txt").touch()
    (folder / "broken").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    assert text_of(files_at(folder)) == b"zed\0bee\0"


def test_a_hidden_folder_that_is_asked_for_is_read(tmp_path):
    hidden = tmp_path / ".notes"
    hidden.mkdir()
    (hidden / "a.txt").write_bytes(b"yes")
    assert text_of(files_at(hidden)) == b"yes\0"


def test_an_empty_folder_has_no_documents(tmp_path):
    assert files_at(tmp_path) == []


def test_a_folder_that_cannot_be_listed_is_an_error_not_a_gap(folder, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # a mode of 000 would not stop root, whom CI often runs as
    with pytest.raises(PermissionError):
        files_at(folder)


def test_identity_is_stable_until_a_document_changes(folder):
    before = identity(files_at(folder))
    assert identity(files_at(folder)) == before
    seen = {before}

    file = folder / "b.txt"
    modified = file.stat().st_mtime_ns
    file.write_bytes(b"beer")
    os.utime(file, ns=(modified, modified))
    seen.add(identity(files_at(folder)))

    os.utime(file, ns=(modified + 1, modified + 1))
    seen.add(identity(files_at(folder)))

    file.rename(folder / "c.txt")
    seen.add(identity(files_at(folder)))

    assert len(seen) == 4, "size, time and name each make a new identity"


def test_standard_library_is_python_without_tests_and_installed_packages():
    root = Path(sysconfig.get_path("stdlib")).resolve()
    found = {file.path.relative_to(root).as_posix() for file in standard_library()}
    assert found == {file.name for file in standard_library()}
    assert {"os.py", "argparse.py", "json/decoder.py"} <= found
    assert all(name.endswith(".py") for name in found)
    assert not [name for name in found if {"site-packages", "test", "tests"} & set(name.split("/"))]
    assert sum(file.size for file in standard_library()) > 5_000_000
