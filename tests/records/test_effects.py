"""What options affect, by the table that all who compare runs go by."""

import pytest

from ptdbench.records.effects import affects, leaves, options_affecting
from ptdbench.setup.config import resolve
from tests.conftest import composed


@pytest.mark.parametrize(("option", "word", "does"), [
    ("optimizer.lr", "layout", False), ("parallel.bucket_mb", "layout", True),
    ("parallel.tensor", "degree", True), ("parallels", "layout", False), ("cluster.partition", "queue", True),
    ("cluster.nodes", "queue", False), ("sweep.same_nodes", "start", False), ("sweep.resume", "start", True),
    ("logger.project", "nothing", True),
])  # fmt: skip
def test_an_option_affects_what_is_said_of_it_or_else_of_its_group(option, word, does):
    assert affects(option, word) is does


def test_what_the_table_names_is_there_also_an_empty_group():
    names = {name for cluster in ("local", "slurm") for name, _ in leaves(resolve(composed(f"cluster={cluster}")))}
    known = names | {name.rpartition(".")[0] for name in names}
    words = ("nothing", "layout", "shape", "queue", "blocks", "degree", "ranks", "batch")
    assert {option for word in words for option in options_affecting(word)} - known == set()
    assert list(leaves({"a": {"b": {"c": 1}}, "d": {}, "e": [{}]})) == [("a.b.c", 1), ("d", {}), ("e", [{}])]
