"""Which runs are repeats of each other, and which of them stands for all."""

from pathlib import Path

import pytest

from ptdbench.comparison import ranking
from ptdbench.comparison.ranking import of_sweeps, rank
from ptdbench.records import ledger, store
from ptdbench.report.labels import names
from tests.report.made import failed, repeated, run


def test_repeats_are_one_alternative_with_the_figure_of_each_block():
    runs = [
        one for pair in zip(repeated("ddp", [10.0, 20.0]), repeated("fsdp", [5.0, 6.0]), strict=True) for one in pair
    ]
    ddp, fsdp = ranking.group_runs(runs)
    assert ddp.runs == runs[::2]
    assert [*ddp.sample.values()] == [10.0, 20.0]
    assert [*fsdp.sample.values()] == [5.0, 6.0]
    assert ddp.sample.keys() == fsdp.sample.keys()


def depth(parallel, parameters, **changes):
    """A run of a model of this size; of one that failed early, its options alone are known."""
    config = {"model": {"depth": changes.pop("depth", parameters)}, "data": changes.pop("data", {})}
    return run(parallel, parameters=parameters, config=config, **changes)


@pytest.mark.parametrize(("runs", "groups"), [
    ([depth("ddp", 1), depth("ddp", 3), depth("fsdp", 1)], [[0, 2], [1]]),
    ([depth("tp", None, depth=3), depth("ddp", 1), depth("ddp", 3)], [[0, 2], [1]]),  # it failed, and is a row
    ([depth("tp", None, depth=5), depth("ddp", 1), depth("ddp", 3)], [[0], [1], [2]]),
    ([depth("ddp", 1, depth=0.1), depth("ddp", 1, depth=0.2)], [[0, 1]]),  # such as dropout
    ([depth("ddp", 1, global_batch=4), depth("ddp", 1, global_batch=8)], [[0], [1]]),
    ([depth("ddp", 1, tokens_per_sample=4), depth("fsdp", 1, tokens_per_sample=8)], [[0], [1]]),
    ([depth("ddp", 1, data={"image_size": 32}), depth("ddp", 1, data={"image_size": 64})], [[0], [1]]),
    ([depth("ddp", 1, world_size=1), depth("ddp", 1, world_size=2, precision="bf16")], [[0, 1]]),
])  # fmt: skip
def test_throughputs_of_the_same_model_on_the_same_global_batch_are_comparable(runs, groups):
    comparable = ranking.comparable(ranking.Alternative([one], {}) for one in runs)
    assert [[runs.index(one.runs[0]) for one in group] for group in comparable] == groups


def test_each_sweep_has_its_own_alternatives_and_single_runs_of_one_folder_are_no_repeats(tmp_path):
    one, other = of_sweeps([one for sweep in "ab" for one in repeated("ddp", [1.0, 2.0], sweep=sweep)])
    assert (len(one.runs), len(other.runs)) == (2, 2)
    assert not one.sample.keys() & other.sample.keys()
    runs = [run("ddp", rate) for rate in (1.0, 2.0)]
    for number, one in enumerate(runs):
        one.directory = str(tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        store.write_record(tmp_path / str(number), one.written)
    assert [len(one.runs) for one in of_sweeps(runs)] == [1, 1]
    (tmp_path / "multirun.yaml").touch()
    assert [len(one.runs) for one in of_sweeps(runs)] == [2]


def test_runs_of_a_sweep_in_nested_folders_share_their_blocks(tmp_path):
    """``hydra.sweep.subdir='${parallel.name}/${repeat.block}'``."""
    ledger.begin(tmp_path, ["parallel=ddp,fsdp"])
    runs = [
        one | {"directory": str(tmp_path / name / str(block))}
        for name in ("ddp", "fsdp")
        for block, one in enumerate(repeated(name, [1.0, 2.0, 3.0]))
    ]
    for one in runs:
        Path(one.directory).mkdir(parents=True)
        store.write_record(Path(one.directory), one.written)
    ddp, fsdp = of_sweeps(runs)
    assert ddp.sample.keys() == fsdp.sample.keys()
    assert len(ddp.runs) == len(fsdp.runs) == 3


def test_every_run_counts_that_has_no_block_or_shares_one():
    """``parallel=ddp,ddp repeat=2``, and a run of the same sweep from before there were repeats."""
    runs = [*repeated("ddp", [1.0, 2.0]), *repeated("ddp", [3.0, 4.0], name="again"), run("ddp", 5.0)]
    runs[-1].config = {**runs[0].config, "repeat": {"runs": 1}}
    (one,) = ranking.group_runs(runs)
    assert sorted(one.sample.values()) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "changes", [{"world_size": 4}, {"config": {"seed": 1}}, {"nodes": ["a", "b"]}, {"workload": "other"}]
)
def test_other_work_is_another_alternative(changes):
    one = run("ddp", nodes=["a"])
    assert len(ranking.group_runs([one, one])) == 1
    assert len(ranking.group_runs([one, one | changes])) == 2


def test_how_often_it_is_repeated_and_other_nodes_or_unknown_ones_make_no_other_alternative():
    one, other = repeated("ddp", [1.0, 2.0])
    more = other | {"config": {**other.config, "repeat": {"runs": 9, "block": 1}}, "nodes": ["b"]}
    assert len(ranking.group_runs([one | {"nodes": ["a"]}, one | {"nodes": None}, more])) == 1


@pytest.mark.parametrize("side", [[], ["others"]])
def test_one_that_never_knew_its_world_belongs_to_those_that_asked_for_the_same(side):
    """As jobs whose nodes fail before a rank has begun; also where only the other side of a comparison has runs."""
    lost = [run("ddp", status="failed", nodes=None, world_size=None, metrics=None) for _ in range(3)]
    known = run("ddp", nodes=["a", "b"], world_size=8)
    own, others = ([], [known]) if side else ([known], [])
    ((identity, alternative),) = ranking.by_identity([*lost, *own], others=others).items()
    assert len(alternative.runs) == 3 + len(own)
    assert identity in ranking.by_identity([known])
    other = {**known.config, "cluster": {"nodes": 4, "ranks_per_node": 4}}
    assert len(ranking.group_runs([lost[0] | {"config": other}, known])) == 2


@pytest.mark.parametrize(
    ("rates", "typical"), [([30.0, 10.0, 20.0], 20.0), ([40.0, 10.0, 30.0, 20.0], 20.0), ([7.0], 7.0)]
)
def test_the_typical_run_is_the_median_one_of_two_the_slower(rates, typical):
    (one,) = ranking.group_runs(repeated("ddp", rates))
    assert one.median_run.throughput == typical


def test_of_failed_runs_the_first_is_the_typical_one_and_of_others_none():
    broken = [failed("ddp", "first"), failed("ddp", "second")]
    assert ranking.group_runs(broken)[0].median_run is broken[0]
    (one,) = ranking.group_runs([*broken, run("ddp", None), run("ddp", 9.0, status="diverged")])
    assert one.median_run.throughput == 250.0  # samples, where they are not tokens
    assert [*one.sample.values()] == [250.0]


def test_each_side_of_a_comparison_has_its_own_alternatives_with_all_its_blocks():
    """Each block of a side is a sweep in a folder of its own, and is compared with that of the other side."""
    runs = [
        one | {"directory": f"outputs/compare/{side}/{block}/0_ddp"}
        for side, factor in (("before", 1.0), ("after", 0.9))
        for block, one in enumerate(
            repeated("ddp", [factor * rate for rate in (10.0, 20.0, 40.0, 41.0)], options={"series": "compare"})
        )
    ]
    groups = of_sweeps(runs)
    assert [len(one.runs) for one in groups] == [4, 4]
    assert groups[0].sample.keys() == groups[1].sample.keys()
    assert names([one.median_run for one in groups]) == ["ddp [before]", "ddp [after]"]
    assert [place.rank for place in rank(groups)] == [(1, 1), (2, 2)]
