"""The tables of options in docs/: every option of conf/ is there, with its value and the comment beside it."""

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FILES = sorted((ROOT / "conf").glob("[!h]*/*.yaml"))
SLURM = """\
# @package _global_
# Jobs of a *cluster*, without _target_.
#
#   python train.py cluster=made parallel=ddp
#
# Both lines
# are one paragraph.

defaults:
  - local
  - override /data@_global_.data: digits
  - _self_

cluster:
  name: made
  nodes: 1    # a | b, such as `x*`
  size: 2.50  # first
              # and second
  none: null
  modules:    # some
    - a/1
    - b

hydra:
  mode: MULTIRUN
"""


@pytest.fixture(scope="module")
def options() -> ModuleType:
    spec = importlib.util.spec_from_file_location("options", ROOT / "docs" / "options.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["options"] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def names(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from names(value, f"{prefix}{key}.")
        elif key not in ("name", "label", "_target_", "_partial_"):
            yield f"{prefix}{key}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_option_of_a_file_is_read(options, path):
    content = {
        key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in ("defaults", "hydra")
    }
    is_global = "@package _global_" in path.read_text()
    group = path.parent.name
    assert {o.name for o in options.read(path, group).options} == set(names(content, "" if is_global else f"{group}."))


def test_choice_has_header_options_and_comments(options, tmp_path: Path):
    (tmp_path / "made.yaml").write_text(SLURM)
    choice = options.read(tmp_path / "made.yaml", "cluster")
    assert (choice.name, choice.target) == ("made", "")
    assert (choice.inherits, choice.chooses) == (("local",), ("data=digits",))
    assert choice.header.split("\n\n") == [
        "Jobs of a \\*cluster\\*, without \\_target\\_.",
        "```sh\npython train.py cluster=made parallel=ddp\n```",
        "Both lines\nare one paragraph.",
    ]
    assert [(o.name, o.value, o.comment) for o in choice.options] == [
        ("cluster.nodes", "1", "a | b, such as `x*`"), ("cluster.size", "2.50", "first and second"),
        ("cluster.none", "null", ""), ("cluster.modules", "[a/1, b]", "some"),
    ]  # fmt: skip


def test_docstrings_and_field_comments_describe_options(options):
    said = options.described("ptdbench.models.gpt.GPT")
    assert said["layers"] == "Number of blocks."
    assert "multiple of 128, which matrix" in said["vocabulary"]  # of two lines
    page = options.markdown("model")
    assert "| `model.layers` | Number of blocks. |" in page
    assert options.described("torch.optim.AdamW") == {}
    said = options.described("ptdbench.workloads.matmul.Matmul")
    assert said.keys() == {"shapes", "dtypes", "seconds"}
    assert said["dtypes"].startswith("One or a list of ``fp32``")
    page = options.markdown("workload")
    assert "| `workload.seconds` | `0.5` | Approximate duration of the repetitions of one shape and dtype. |" in page


@pytest.mark.parametrize("group", ["activations", "cluster", "data", "logger", "model", "parallel", "workload"])
def test_option_is_described_once_without_empty_columns(options, group):
    page = options.markdown(group)
    assert "In detail" not in page
    for table in re.findall(r"(?:^\|.*\n?)+", page, re.MULTILINE):
        assert not all(row.endswith("|  |") for row in table.splitlines()[2:]), table


def test_common_options_are_listed_once_in_place_of_the_marker(options):
    page = options.markdown("parallel")
    assert page.count("## Options of every choice") == page.count("`parallel.bucket_mb`") == 1
    assert page.index("| `parallel.replicate` | `node` |") < page.index("## Options of every choice")
    page = options.expand("# Title\n\n<!-- options: optimizer -->\n\nThe end.\n")
    assert page.startswith("# Title\n\n## adamw\n")
    assert "| `optimizer.lr` | `1e-3` |" in page
    assert page.endswith("\n\nThe end.\n")
