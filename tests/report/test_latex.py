"""The report as tables in LaTeX."""

import re

import pytest

from ptdbench.report.latex import latex
from tests.report.made import failed, loaded, repeated, run


@pytest.fixture(scope="module")
def text():
    ddp, fsdp = (repeated(name, [factor * rate for rate in (1000.0, 1010.0, 990.0)], environment={"devices": ["A"]})
                 for name, factor in (("ddp", 1), ("fs_dp", 0.5)))  # fmt: skip
    other = run(model="toy", environment={}), failed("50%", "no"), run(model=None, workload="hello")
    return latex("A & B\n", "2 runs", [*ddp, *fsdp, *loaded(*other[:2]), *loaded(other[2], sweep="outputs/b")])


def test_a_table_for_each_model_with_intervals_and_ranks_of_what_differs(text):
    lines = [line.strip() for line in text.splitlines()]
    assert lines[:3] == ["% A & B", "% 2 runs", r"% \usepackage{booktabs}"]
    assert text.count(r"\begin{tabular}") == 2
    head, ddp, fsdp, tp = [line.removesuffix(r" \\").split(" & ") for line in lines[3:] if " & " in line][:4]
    assert head[:5] == [r"\#", "runs", "parallel", "tokens/s", "tokens/s/GPU"]  # all have 2 ranks and batch 16
    assert ddp[:3] == ["1", "3", "ddp"]
    assert fsdp[2:5:2] == [r"fs\_dp", "250"]
    assert re.fullmatch(r"0\.50x \(0\.\d\d--0\.5\d\)", fsdp[5])
    assert (ddp[3][:11], tp[2:4]) == (r"1,000 $\pm$", [r"50\%", "-"])
    assert r"fp32 $\cdot$ 2 ranks $\cdot$ batch 16. ddp is fastest: 2.000x fs\_dp (95 \%: 2.0" in text
