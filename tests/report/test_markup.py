"""The report as Markdown, and its tables in LaTeX."""

import re

import pytest

from ptdbench.report.markup import latex, markdown
from tests.report.made import DDP, FSDP, failed, loaded, repeated, run, thrice


def made(*records):
    return markdown("my_sweep", "2 runs", loaded(*records))


def test_a_table_sentences_commands_and_the_environment():
    environment = {"host": "n1", "torch": "2.15.0", "settings": {"OMP_NUM_THREADS": "1"}}
    text = made(
        *thrice(DDP | {"overrides": ["parallel=ddp"], "environment": environment}),
        *thrice(FSDP | {"environment": environment}),
    )
    lines = text.splitlines()
    assert lines[0].startswith("**ddp is fastest: 1.579x fsdp (95%: ")  # 120 ms over 76 ms
    assert lines[1:5] == ["", "# my\\_sweep", "", "2 runs"]
    head = next(place for place, line in enumerate(lines) if line.startswith("| # |"))
    assert lines[head + 1].startswith("| ---: | ---: | --- |")
    assert [line.split(" | ")[2] for line in lines[head + 2 : head + 4]] == ["ddp", "fsdp"]
    assert "- fsdp +44 ms vs ddp: " in text
    assert " parallel=ddp\n" in text
    assert "# fsdp\nthe command is not on record\n" in text
    assert "<summary>environment: n1, torch 2.15.0</summary>" in text
    assert text.count("torch: 2.15.0\n") == 1
    assert "settings.OMP_NUM_THREADS: 1" in text


def test_what_was_typed_is_no_markup():
    text = made(run(), failed("fsdp", "<b>a|b</b> `rm` *x* @ada &lt; $1\nnext"))
    assert "\\<b\\>a\\|b\\</b\\> \\`rm\\` \\*x\\* &#64;ada &amp;lt; \\$1 next" in text
    text = made(run(environment={"host": "n1", "torch": "<b>a_b</b> @ada\n\nx", "git_commit": "abc"}), run("fsdp"))
    assert "<summary>environment: n1, torch &lt;b&gt;a_b&lt;/b&gt; &#64;ada x</summary>" in text
    text = made(run(overrides=["a=\x1b[2J"], environment={"host": "\x1b]0;x\x07"}), failed("fsdp", "\x1b[31m\u202e"))
    assert all(letter in "\n" or letter.isprintable() for letter in text)
    assert "\\x1b[2J" in text
    text = made(run(overrides=["a=```b"]))
    assert "````text\n# ddp\n" in text


def test_other_workloads_are_shown_as_in_the_terminal():
    text = made(run(model=None, parallel=None, workload="hello", config={}, overrides=["workload=hello"]))
    assert "## hello\n\n```text\nhello: ok, without a result to show: its outcome has no field hello" in text
    assert " workload=hello\n" in text


@pytest.fixture(scope="module")
def tables():
    ddp, fsdp = (repeated(name, [factor * rate for rate in (1000.0, 1010.0, 990.0)], environment={"devices": ["A"]})
                 for name, factor in (("ddp", 1), ("fs_dp", 0.5)))  # fmt: skip
    other = run(model="toy", environment={}), failed("50%", "no"), run(model=None, workload="hello")
    return latex("A & B\n", "2 runs", [*ddp, *fsdp, *loaded(*other[:2]), *loaded(other[2], sweep="outputs/b")])


def test_a_table_for_each_model_with_intervals_and_ranks_of_what_differs(tables):
    lines = [line.strip() for line in tables.splitlines()]
    assert lines[:3] == ["% A & B", "% 2 runs", r"% \usepackage{booktabs}"]
    assert tables.count(r"\begin{tabular}") == 2
    head, ddp, fsdp, tp = [line.removesuffix(r" \\").split(" & ") for line in lines[3:] if " & " in line][:4]
    assert head[:5] == [r"\#", "runs", "parallel", "tokens/s", "tokens/s/GPU"]  # all have 2 ranks and batch 16
    assert ddp[:3] == ["1", "3", "ddp"]
    assert fsdp[2:5:2] == [r"fs\_dp", "250"]
    assert re.fullmatch(r"0\.50x \(0\.\d\d--0\.5\d\)", fsdp[5])
    assert (ddp[3][:11], tp[2:4]) == (r"1,000 $\pm$", [r"50\%", "-"])
    assert r"fp32 $\cdot$ 2 ranks $\cdot$ batch 16. ddp is fastest: 2.000x fs\_dp (95\%: 2.0" in tables
