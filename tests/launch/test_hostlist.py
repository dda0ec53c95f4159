"""SLURM's lists of hosts, held against what its own tool prints."""

import pytest

from ptdbench.launch import hostlist

#: As ``scontrol show hostnames`` of Slurm 22.05 prints them; of three brackets the middle one counts slowest.
EXAMPLES = {
    "login,gpu[1-2]": "login gpu1 gpu2",
    "gpu[01-03,7]": "gpu01 gpu02 gpu03 gpu7",
    "x[1-2]y[08-10]": "x1y08 x1y09 x1y10 x2y08 x2y09 x2y10",
    "x[1-2][3-4]": "x13 x14 x23 x24",
    "a[0-1]b[1-2]c[3-4]": "a0b1c3 a0b1c4 a1b1c3 a1b1c4 a0b2c3 a0b2c4 a1b2c3 a1b2c4",
    "n[9-11],n[009-10],n[1-0003]": "n9 n10 n11 n009 n010 n1 n2 n3",
    "n[2,1,1],[1-2],,b,b,": "n2 n1 n1 1 2 b b",
    "a b": "a b",
    "": "",
}

#: Names that go on after their brackets, which scontrol 22.05 refuses.
SUFFIXES = {
    "gpu[01-03,7]-ib,cpu[1-2]": "gpu01-ib gpu02-ib gpu03-ib gpu7-ib cpu1 cpu2",
    "rack[0-1]node[1-2].site": "rack0node1.site rack0node2.site rack1node1.site rack1node2.site",
}


@pytest.mark.parametrize(("text", "hosts"), (EXAMPLES | SUFFIXES).items())
def test_host_list_is_expanded_as_by_scontrol(text, hosts):
    assert hostlist.expand(text) == hosts.split()


@pytest.mark.parametrize("text", [
    "n[1", "n1]", "n[1-2", "n[[1-2]]", "n[1-2]]", "n]1[", "a,n[1", "n[3-1]", "n[10-9]", "n[]", "n[1,]", "n[1-]",
    "n[-2]", "n[1--2]", "n[1-2-3]", "n[a-b]", "n[1x]", "n[1 - 2]", "n[²]",
])  # fmt: skip
def test_malformed_host_list_is_refused(text):
    with pytest.raises(ValueError, match=r"brackets of|is not a number or a range|counts down"):
        hostlist.expand(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("16(x1)", [16]), ("1(x2),1,3(x2)", [1, 1, 1, 3, 3])]
)
def test_tasks_per_node(text, counts):
    assert hostlist.tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x3", "2(x3", "2(3)", "2,,1", "2(x3),", "-1", "two", "2 (x3)"])
def test_malformed_task_list_is_refused(text):
    with pytest.raises(ValueError, match=r"such as 2\(x3\),1"):
        hostlist.tasks_per_node(text)
