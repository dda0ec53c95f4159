import os
import subprocess
import sys

import pytest
import torch

from ptdbench.data.text import Text
from ptdbench.problems import ConfigError

CONTENT = bytes(range(1, 256)) * 3  # every byte but the separator; position p holds 1 + p % 255


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test may reach the cache of whoever runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "ptdbench"


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(CONTENT)
    return file


def text(path, **options):
    return Text(**{"sequence_length": 16, "vocabulary": 256, "seed": 3, "path": str(path)} | options)


def refusals(**options):
    with pytest.raises(ConfigError) as caught:
        Text(**{"sequence_length": 16, "vocabulary": 256, "seed": 3} | options)
    return caught.value.problems


def refused_at_prepare(source):
    with pytest.raises(ConfigError) as caught:
        source.prepare()
    (problem,) = caught.value.problems
    return problem


def test_targets_are_the_bytes_one_place_further(file):
    inputs, targets = text(file).samples(0, 64)
    assert inputs.shape == targets.shape == (64, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert bytes([*row, following[-1]]) in CONTENT + b"\0"


def test_samples_do_not_depend_on_the_split(file):
    whole = text(file).samples(0, 8)
    other = text(file)
    later = other.samples(3, 8)  # another object, another order
    earlier = other.samples(0, 3)
    for all_at_once, a, b in zip(whole, earlier, later, strict=True):
        assert torch.equal(all_at_once, torch.cat([a, b]))


def test_samples_differ_from_each_other_and_between_seeds(file):
    inputs, _ = text(file).samples(0, 100)
    assert len(inputs.unique(dim=0)) > 50
    assert not torch.equal(inputs, text(file, seed=4).samples(0, 100)[0])


def test_every_window_is_drawn_from_first_to_last(tmp_path):
    file = tmp_path / "short.txt"
    file.write_bytes(b"abcdef")  # with its separator 7 tokens: windows of 5 begin at 0, 1 and 2
    _, targets = text(file, sequence_length=4).samples(0, 200)
    assert {bytes(row) for row in targets.tolist()} == {b"bcde", b"cdef", b"def\0"}


def test_a_text_of_exactly_one_sample_will_do(tmp_path):
    file = tmp_path / "tiny.txt"
    file.write_bytes(b"abcd")
    inputs, targets = text(file, sequence_length=4).samples(10**12, 10**12 + 2)
    assert inputs.tolist() == [list(b"abcd")] * 2
    assert targets.tolist() == [list(b"bcd\0")] * 2


def test_an_empty_range_is_an_empty_batch(file):
    inputs, targets = text(file).samples(5, 5)
    assert inputs.shape == targets.shape == (0, 16)


def test_example_has_the_form_of_a_sample_without_touching_the_text(tmp_path):
    source = text(tmp_path)  # an empty folder, which prepare() would refuse
    for tensor in source.example():
        assert tensor.shape == (1, 16)
        assert tensor.dtype == torch.int64
        assert tensor.is_meta
    assert source.tokens_per_sample == 16


def test_by_default_it_is_the_standard_library_in_the_users_cache(cache):
    source = Text(sequence_length=64, vocabulary=256, seed=0)
    assert not cache.exists(), "a constructor is light"
    source.prepare()
    (built,) = cache.glob("*.tokens")
    assert built.name.startswith(f"python-{sys.version_info.major}.{sys.version_info.minor}")

    inputs, _ = source.samples(0, 2000)
    words = b" ".join(bytes(row) for row in inputs.tolist())
    assert b"return" in words
    assert b"self." in words


def test_a_second_object_maps_the_file_of_the_first(file, cache):
    first = text(file)
    first.prepare()
    (built,) = cache.glob("*.tokens")
    before = built.stat()
    second = text(file)
    second.prepare()
    second.prepare()
    after = built.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert torch.equal(first.samples(0, 4)[0], second.samples(0, 4)[0])


def test_a_changed_text_gets_a_cache_of_its_own(file, cache):
    text(file).prepare()
    file.write_bytes(b"x" * len(CONTENT))
    os.utime(file, ns=(1, 1))  # certainly another time, however coarse the file system's clock
    inputs, _ = text(file).samples(0, 4)
    assert set(inputs.flatten().tolist()) == {ord("x")}
    assert len(list(cache.glob("*.tokens"))) == 2


def test_a_truncated_cache_is_rebuilt(file, cache):
    whole = text(file).samples(0, 4)[0]
    (built,) = cache.glob("*.tokens")
    os.truncate(built, built.stat().st_size // 2)
    assert torch.equal(text(file).samples(0, 4)[0], whole)


def test_the_cache_can_lie_elsewhere(file, cache, tmp_path):
    text(file, cache=str(tmp_path / "scratch" / "deep")).prepare()
    assert list((tmp_path / "scratch" / "deep").glob("book.txt-*.tokens"))
    assert not cache.exists()


def test_odd_and_long_names_make_usable_cache_names(tmp_path, cache):
    file = tmp_path / ("täxt =, " + "x" * 200)
    file.write_bytes(CONTENT)
    text(file).prepare()
    (built,) = cache.glob("*.tokens")
    assert built.name.isascii()
    assert not set("=, ") & set(built.name)


def test_all_bad_options_are_reported_at_once(tmp_path):
    problems = refusals(sequence_length=0, vocabulary=100, seed=-1, path=str(tmp_path / "nowhere"))
    assert [problem.option for problem in problems] == ["sequence_length", "vocabulary", "seed", "path"]
    assert "256" in problems[1].rule


def test_a_missing_path_names_what_may_have_been_meant(file):
    (problem,) = refusals(path=str(file.with_name("bok.txt")))
    assert problem.option == "path"
    assert problem.remedy == f"would do: {file}"


def test_a_path_below_a_missing_folder_is_refused(tmp_path):
    (problem,) = refusals(path=str(tmp_path / "no" / "such"))
    assert (problem.option, problem.remedy) == ("path", "")


def test_an_empty_folder_is_refused_at_prepare(tmp_path, cache):
    assert refused_at_prepare(text(tmp_path)).option == "path"
    assert not cache.exists()


def test_a_text_shorter_than_a_sample_is_refused_at_prepare(tmp_path, cache):
    file = tmp_path / "short.txt"
    file.write_bytes(b"abcd")
    problem = refused_at_prepare(text(file, sequence_length=5))
    assert (problem.option, problem.value, problem.remedy) == ("sequence_length", 5, "would do: 4")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_a_problem_of_that_option(file):
    assert refused_at_prepare(text(file, cache=str(file / "below a file"))).option == "cache"


def test_a_document_that_cannot_be_read_is_a_problem_of_the_path(file, cache, monkeypatch):
    def refusing(documents):
        raise PermissionError(13, "Permission denied", str(file))
        yield

    monkeypatch.setattr("ptdbench.data.text.byte_tokens", refusing)
    problem = refused_at_prepare(text(file))
    assert problem.option == "path"
    assert str(file) in problem.rule
    assert not list(cache.glob("*.tokens"))


def test_the_samples_are_the_same_in_another_process(file):
    program = (
        "import sys; from ptdbench.data.text import Text;"
        "source = Text(sequence_length=16, vocabulary=256, seed=3, path=sys.argv[1]);"
        "print(source.samples(4, 6)[0].tolist())"
    )
    command = [sys.executable, "-c", program, str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert answer.strip() == str(text(file).samples(4, 6)[0].tolist())
