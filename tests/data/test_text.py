import json
import os
import shutil
import subprocess
import sys

import pytest
import tokenizers
import torch

from ptdbench.data.text import Text
from tests.data import tiny_tokenizer
from tests.data.made import problem_of

CONTENT = bytes(range(1, 256)) * 3  # every byte but the separator; position p holds 1 + p % 255


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def folder(tmp_path):
    """Forty documents of eleven bytes."""
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number:02}")
    lines = [json.dumps({"text": f"document {number}"}) for number in range(20, 40)]
    (folder / "rest.jsonl").write_text("\n".join(lines))
    return folder


def text(path=None, **options):
    path = {} if path is None else {"path": str(path)}
    return Text(**{"sequence_length": 16, "vocabulary": 256, "seed": 3} | path | options)


def refused(path=None, **options):
    """The problem of an option, or of the text when it is prepared."""
    return problem_of(lambda: text(path, **options).prepare())


def told(problem):
    return problem.option, problem.value, problem.remedy


def test_every_window_is_drawn(tmp_path):
    file = tmp_path / "short.txt"
    file.write_bytes(b"abcdef")  # with its separator 7 tokens: windows of 5 begin at 0, 1 and 2
    inputs, targets = text(file, sequence_length=4).samples(0, 200)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert {bytes(row) for row in targets.tolist()} == {b"bcde", b"cdef", b"def\0"}
    inputs, _ = text(file, sequence_length=6).samples(10**12, 10**12 + 2)
    assert inputs.tolist() == [list(b"abcdef")] * 2  # a text of exactly one sample will do


def test_default_is_the_standard_library(cache):
    source = text(sequence_length=64)
    assert not cache.exists(), "a constructor is light"
    source.prepare()
    (built,) = cache.glob("*.bin")
    assert built.name.startswith(f"python-{sys.version_info.major}.{sys.version_info.minor}")
    words = b" ".join(bytes(row) for row in source.samples(0, 2000)[0].tolist())
    assert b"return" in words
    assert b"self." in words


def test_cache_can_lie_elsewhere_under_ascii_names(file, cache, tmp_path):
    text(file, cache=str(tmp_path / "scratch" / "deep")).prepare()
    assert list((tmp_path / "scratch" / "deep").glob("book.txt-*.bin"))
    assert not cache.exists()
    text(file.rename(file.with_name("täxt =, " + "x" * 200))).prepare()
    (built,) = cache.glob("*.bin")
    assert built.name.isascii()
    assert not set("=, ") & set(built.name)


def test_a_vocabulary_has_an_entry_for_each_byte():
    assert "256" in refused(vocabulary=255).rule


def test_what_cannot_be_read_or_divided_is_refused(file, tmp_path, cache):
    for share in (1, 1.0, -0.1, 2, float("nan"), True, False, "0.1", None):
        assert refused(held_out=share).option == "held_out"
    assert told(refused(missing := file.with_name("bok.txt"))) == ("path", missing, f"try {file}")
    assert told(refused(missing := file.parent / "no" / "such")) == ("path", missing, "")
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").option == "path"
    assert refused(file, cache=str(file / "below a file")).option == "cache"
    assert not cache.exists()
    file.write_bytes(b"abcd")
    for _ in range(2):  # also where its tokens are there
        assert told(refused(file, sequence_length=5)) == ("sequence_length", 5, "try a sequence_length of 4")
    assert not list(cache.glob("*.partial"))
    text(file, sequence_length=4).prepare()


class TestTokenizer:
    NUMBERS = {"one": 1, "two": 2, "three": 3, "</s>": 4}  # noqa: RUF012

    @pytest.fixture
    def numbers(self, tmp_path):
        return str(tiny_tokenizer.words(tmp_path / "numbers.json", self.NUMBERS))

    @pytest.fixture
    def counting(self, tmp_path):
        file = tmp_path / "counting.txt"
        file.write_text("one two three two")
        return file

    def test_small_vocabularies_are_refused_and_tokenizers_imported_on_demand(self, tmp_path):
        path = str(tiny_tokenizer.words(tmp_path / "t.json", {f"w{number}": number for number in range(1, 1000)}))
        problem = refused(vocabulary=999, tokenizer=path)
        assert told(problem) == ("vocabulary", 999, "try model.vocabulary=1024")
        assert "1000 tokens" in problem.rule
        for none in (0, None, 2.5):
            assert refused(vocabulary=none, tokenizer=path).option == "vocabulary"
        text(vocabulary=1000, tokenizer=path)
        program = "import sys, ptdbench.data.corpus; sys.exit(bool({'tokenizers', 'rich', 'torch'} & {*sys.modules}))"
        subprocess.run([sys.executable, "-c", program], timeout=240, check=True)

    def test_tokenizers_have_separate_caches(self, counting, numbers, tmp_path, cache):
        other = tiny_tokenizer.words(tmp_path / "other.json", {"one": 70_000, "two": 65_535, "three": 3})
        shutil.copystat(numbers, other)
        before = text(counting, tokenizer=numbers, sequence_length=3).samples(0, 20)[0]
        after = text(counting, tokenizer=str(other), sequence_length=3, vocabulary=70_001).samples(0, 1)
        assert before.unique(dim=0).tolist() == [[1, 2, 3], [2, 3, 2]]
        assert [tensor.tolist() for tensor in after] == [[[70_000, 65_535, 3]], [[65_535, 3, 65_535]]]
        assert len(list(cache.glob("*.bin"))) == 2

    def test_malformed_text_leaves_no_cache_and_empty_text_is_refused(self, tmp_path, numbers, cache, monkeypatch):
        monkeypatch.setattr("ptdbench.data.corpus._BATCH", 1)  # what comes before it is written
        file = tmp_path / "counting.jsonl"
        file.write_text('{"text": "one"}\n{"text": "two"}\nthree\n')
        problem = refused(file, tokenizer=numbers)
        assert (problem.option, problem.value) == ("path", file)
        assert f"{file}, line 3: " in problem.rule
        assert {path.suffix for path in cache.iterdir()} == {".lock"}
        file.write_text('{"text": ""}\n')
        problem = refused(file, tokenizer=numbers)
        assert (problem.option, problem.rule) == ("path", "has no text")


class TestHeldOut:
    """Forty documents of eleven bytes, of which some are kept from training."""

    def documents(self, tokens):
        return bytes(tokens).decode().rstrip("\0").split("\0")

    def row(self, held_out):
        """The tokens that the windows cover."""
        inputs, targets = held_out.samples(0, len(held_out))
        assert inputs.shape == targets.shape == (len(held_out), inputs.shape[1])
        return [*inputs.flatten().tolist(), targets[-1, -1].item()]

    def test_parts_are_disjoint_and_complete(self, folder):
        source = text(folder, held_out=0.3, sequence_length=11)
        held_out = self.documents(self.row(text(folder, held_out=0.3, sequence_length=1).held_out))
        trained = {bytes(row[at : at + 2]) for row in source.samples(0, 5000)[0].tolist() for at in range(10)}
        numbers = [number for number in range(40) if f"{number:02}".encode() in trained]
        every = [f"document {number:02}" for number in range(40)]
        assert sorted([every[number] for number in numbers] + held_out) == every
        assert 1 < len(held_out) < 30

    def test_held_out_windows_are_adjacent(self, folder):
        long = self.row(text(folder, held_out=0.3, sequence_length=1).held_out)  # all of it
        assert len(long) % 12 == 0
        held_out = text(folder, held_out=0.3, sequence_length=7).held_out
        assert (len(held_out), held_out.bytes_per_token) == ((len(long) - 1) // 7, 1.0)
        for tensor, wanted in zip(held_out.samples(1, 3), (long[7:21], long[8:22]), strict=True):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
            assert tensor.tolist() == [wanted[:7], wanted[7:]]
        assert held_out.samples(2, 2)[0].shape == (0, 7)

    def test_part_needs_one_window(self, folder):
        share = 0.095  # of the places in 0 to 1 two are below
        tokens = len(self.row(text(folder, held_out=share, sequence_length=1).held_out))
        assert tokens == 24, "two documents and their separators"
        assert len(text(folder, held_out=share, sequence_length=23).held_out) == 1
        problem = refused(folder, held_out=share, sequence_length=24)
        assert told(problem) == ("held_out", share, "try a larger fraction, a sequence_length of 23")
        assert "24 tokens" in problem.rule
        remedy = "more documents, which are files and lines of .jsonl files (split -l 1000 splits a file)"
        assert told(refused(folder, held_out=1e-9)) == ("held_out", 1e-9, f"try a larger fraction, {remedy}")
        assert told(refused(folder, held_out=1 - 1e-9)) == ("held_out", 1 - 1e-9, f"try a smaller fraction, {remedy}")

    def test_bytes_per_token_of_held_out_text(self, folder, tmp_path):
        path = tiny_tokenizer.pairs(tmp_path / "pairs.json", "document 0 document 1 " * 20, size=290)
        options = {"held_out": 0.3, "tokenizer": str(path), "vocabulary": 320, "sequence_length": 1}
        held_out = text(folder, **options).held_out
        row = self.row(held_out)
        ends = row.count(0)
        written = tokenizers.Tokenizer.from_file(str(path)).decode(row, skip_special_tokens=True)
        assert len(written) == 11 * ends
        assert held_out.bytes_per_token == pytest.approx(11 * ends / len(row))
        assert 1 < held_out.bytes_per_token < 11
        # The figure is that of the file, not of who made it.
        assert text(folder, **options).held_out.bytes_per_token == held_out.bytes_per_token

    def test_each_part_and_each_share_has_its_file(self, folder, cache):
        text(folder, held_out=0.3).prepare()
        assert sorted(path.name.rpartition("-")[0] for path in cache.glob("*.bin")) == ["books", "books-held_out"]
        before = {path: path.stat().st_ino for path in cache.glob("*.bin")}
        text(folder, held_out=0.3, sequence_length=8, seed=7, vocabulary=512).prepare()
        assert {path: path.stat().st_ino for path in cache.glob("*.bin")} == before
        text(folder, held_out=0.5).prepare()
        text(folder).prepare()
        assert len(list(cache.glob("*.bin"))) == 5


class TestIdentity:
    def test_ignores_place_and_time(self, folder, tmp_path):
        before = text(folder).identity
        assert text(folder, sequence_length=8, seed=7, vocabulary=512).identity == before
        for file in folder.iterdir():
            os.utime(file, ns=(1, 1))
        assert text(folder).identity == before
        folder.rename(tmp_path / "moved")
        assert text(tmp_path / "moved", cache=str(tmp_path / "another")).identity == before

    def test_changes_with_text_split_and_tokenizer(self, folder, tmp_path):
        pairs = str(tiny_tokenizer.pairs(tmp_path / "pairs.json", "document 0"))
        options = [{}, {"held_out": 0.2}, {"held_out": 0.7}, {"tokenizer": pairs, "vocabulary": 320}]
        identities = [text(folder, **more).identity for more in options]
        (folder / "3.txt").write_text("document 08")
        os.utime(folder / "3.txt", ns=(1, 1))
        identities += [text(folder, **more).identity for more in options]
        assert len(set(identities)) == 8
