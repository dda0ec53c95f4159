import shlex

import pytest

from ptdbench.problems import ConfigError, Problem, divisors, first_line, in_shell, nearest, nearest_numbers, try_these


def test_problem_is_option_value_rule_and_remedy():
    problem = Problem("train.global_batch", 17, "must be a multiple of 2", try_these([16, 18]))
    assert str(problem) == "train.global_batch=17: must be a multiple of 2; try 16, 18"
    assert str(Problem("train.steps", 0, "must be at least 1", try_these([]))) == "train.steps=0: must be at least 1"


@pytest.mark.parametrize(("value", "typed"), [(True, "true"), (False, "false"), (None, "null"), (1, "1"), ([1], "[1]")])
def test_values_are_shown_as_typed(value, typed):
    assert str(Problem("compile", value, "no")) == f"compile={typed}: no"


@pytest.mark.parametrize("value", ["x", "odd lr=0.1,bs=2 ü#1 100% a@b {c} $x", "it's", "it's $5", "'a b'", "a\\'b"])
def test_override_is_quoted_for_a_shell(value):
    assert shlex.split(in_shell("resume", value)) == [f"resume={value}"]


def test_error_lists_each_problem_once():
    lists = [Problem("model.layers", [1, 2], "must be a whole number") for _ in range(2)]
    error = ConfigError([*lists, Problem("seed", -1, "must be at least 0")])
    assert [problem.option for problem in error.problems] == ["model.layers", "seed"]
    assert str(error) == "model.layers=[1,2]: must be a whole number\nseed=-1: must be at least 0"


class Mute(ValueError):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("one"), "one"),
    (ValueError("\n  two\nthree"), "two"),
    (ValueError(), "ValueError"),
    (Mute(), "(no message: the exception's own __str__ raised RuntimeError)"),
])  # fmt: skip
def test_first_line_of_an_error(error, line):
    assert first_line(error) == line


@pytest.mark.parametrize(
    ("word", "found"), [("pddp", ["ddp", "pdp"]), ("DDP", ["ddp", "pdp"]), ("snigle", ["single"]), ("quantum", [])]
)
def test_nearest_names(word, found):
    assert sorted(nearest(word, ["single", "ddp", "fsdp", "pdp"])) == found
    assert nearest("gpt_tyny", ["gpt_xl", "gpt_1t", "gpt_tiny", "gpt_small"])[0] == "gpt_tiny"  # first, if several do


def test_nearest_numbers_are_ascending():
    assert nearest_numbers(5, [1, 2, 3, 4, 6, 12]) == [3, 4, 6]
    assert nearest_numbers(100, [1, 2, 3, 4]) == [2, 3, 4]
    assert nearest_numbers(5, []) == []


@pytest.mark.parametrize(("number", "found"), [(1, [1]), (36, [1, 2, 3, 4, 6, 9, 12, 18, 36]), (13, [1, 13])])
def test_divisors_are_complete_and_ascending(number, found):
    assert divisors(number) == found


@pytest.mark.timeout(10)
def test_divisors_of_a_large_number_are_fast():
    assert divisors(2**40) == [2**power for power in range(41)]
