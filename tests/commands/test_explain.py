"""``ptdbench explain``: what it prints and its exit status."""

from functools import partial

import pytest

from tests.report.made import DDP, FSDP, PDP, failed, keep, repeated, run

TOY = DDP | {"model": "toy", "config": DDP.config | {"model": "toy"}}


@pytest.fixture
def explain(ptdbench):
    return partial(ptdbench, "explain")


@pytest.fixture
def sweep(tmp_path):
    """Three runs with phases."""
    for number, record in enumerate((FSDP, DDP, PDP)):
        keep(tmp_path / "sweep", f"{number}_gpt_tiny_{record.parallel}", record)
    return tmp_path / "sweep"


def keep_repeats(sweep, record, rates):
    """The run in several blocks, with these throughputs and steps that fit them."""
    for block, (rate, one) in enumerate(zip(rates, repeated(record.parallel, rates), strict=True)):
        metrics = record["metrics"] | {"tokens_per_second": rate}
        phases = record["phases"] | {"step_seconds": 1 / rate}
        found = record | {"metrics": metrics, "phases": phases, "config": one.config}
        keep(sweep, f"{block}_{record.parallel}", found)


class TestSweep:
    def test_the_fastest_comes_first_and_the_others_are_compared_with_it(self, explain, sweep):
        status, out, err = explain(sweep)
        assert (status, err) == (0, [])
        first, *lines = out.splitlines()
        assert first == "gpt_tiny · 1,234,567 parameters · fp32 · batch 16"
        assert [line.split()[0] for line in lines[2:5]] == ["ddp", "pdp", "fsdp"]
        assert "pdp 1x2 1f1b +24 ms vs ddp: bubble +24" in lines[-2]
        assert "fsdp +44 ms vs ddp: " in lines[-1]

    def test_the_order_is_that_of_the_table_and_only_a_known_one_is_explained(self, explain, tmp_path):
        """The typical step of fsdp is shorter than that of ddp, whose mean over runs is the faster one."""
        for record, rates in ((DDP, [9.0, 10.0, 30.0]), (FSDP, [11.0, 10.5, 11.5]), (PDP, [1.0, 1.01, 0.99])):
            keep_repeats(tmp_path / "sweep", record, rates)
        _, out, _ = explain(tmp_path / "sweep")
        assert [line.split()[0] for line in out.splitlines()[3:6]] == ["ddp", "fsdp", "pdp"]
        assert "fsdp: not significantly slower than ddp, so not explained" in out.splitlines()
        assert "pdp 1x2 1f1b +900 ms vs ddp: " in out

    def test_of_repeats_the_median_run_stands_for_all(self, explain, tmp_path):
        for record, rates in ((FSDP, [30.0, 10.0, 20.0]), (DDP, [60.0, 50.0])):
            keep_repeats(tmp_path / "sweep", record, rates)
        status, out, err = explain(tmp_path / "sweep")
        assert (status, err) == (0, [])
        assert [line.split()[:2] for line in out.splitlines()[3:5]] == [["ddp", "20.0"], ["fsdp", "50.0"]]
        assert out.splitlines()[-1] == "shown: the run with the median throughput of ddp (2 runs), fsdp (3 runs)"
        assert "median" not in explain(tmp_path / "sweep" / "0_ddp")[1]

    def test_runs_of_other_work_stand_apart(self, explain, sweep):
        keep(sweep, "3_toy", TOY)
        status, out, _ = explain(sweep)
        first, second = out.split("\ntoy · ")
        assert status == 0
        assert "fsdp +44 ms" in first
        assert "\nddp: forward 32%" in second

    def test_runs_without_phases_are_named(self, explain, sweep):
        path = keep(sweep, "3_gpt_tiny_tp", failed("tp", "no room", "oom"))
        status, out, _ = explain(sweep)
        assert status == 0
        assert out.splitlines()[-1].startswith(f"{path}: no phases: the run did not finish (oom)")

    def test_two_sweeps_of_the_same_runs_are_told_apart_and_two_of_the_same_name_by_their_directories(
        self, explain, tmp_path
    ):
        for name in ("a", "b"):
            keep(tmp_path / "named" / name, "0_gpt_tiny_ddp", DDP)
        paths = [keep(tmp_path / "alike" / name / "sweep", "0_gpt_tiny_ddp", DDP) for name in ("a", "b")]
        assert all(f"\nddp [{name}] " in explain(tmp_path / "named")[1] for name in ("a", "b"))
        assert all(f"\nddp [{path.parent}] " in explain(tmp_path / "alike")[1] for path in paths)


class TestOneRun:
    def test_its_ranks(self, explain, sweep):
        status, out, err = explain(sweep / "2_gpt_tiny_pdp")
        assert (status, err) == (0, [])
        rows = [line.split("  ")[0] for line in out.splitlines()[1:6] if not line.startswith("─")]
        assert rows == ["rank", "mean", "rank 0 (stage 0)", "rank 1 (stage 1)"]
        assert "pdp 1x2 1f1b: data 1%, forward 25%" in out

    def test_against_another(self, explain, sweep):
        fsdp, ddp = sweep / "0_gpt_tiny_fsdp", sweep / "1_gpt_tiny_ddp"
        status, out, err = explain(fsdp, ddp)
        assert (status, err) == (0, [])
        assert out.splitlines()[-1].startswith("fsdp +44 ms vs ddp: ")
        again = keep(sweep.parent / "again", "1_gpt_tiny_ddp", DDP)
        assert "ddp [again] 76.0 ms vs ddp [sweep] 76.0 ms: within 2%" in explain(ddp, again, ddp)[1]


class TestRefused:
    def test_runs_without_phases(self, explain, tmp_path):
        runs = (run(config={"profile": {"steps": 0}}), run(model=None, workload="hello"))
        paths = [keep(tmp_path, str(number), one) for number, one in enumerate(runs)]
        lines = [
            f"{paths[0]}: no phases: profile.steps=0; run it again with profile.steps=5",
            f"{paths[1]}: workload=hello does not train, so it has no phases; give a run of workload=train",
        ]
        assert explain(paths[0]) == (1, "", lines[:1])
        assert explain(*paths) == (1, "", lines)
        assert explain(tmp_path) == (1, "", lines)

    def test_virtual_runs_that_failed(self, explain, tmp_path):
        gone = [keep(tmp_path, name, failed(name, "no room", "oom") | {"kind": "virtual"}) for name in ("ddp", "tp")]
        status, out, lines = explain(tmp_path)
        assert (status, out) == (1, "")
        assert [line.partition(": no phases")[0] for line in lines] == [str(path) for path in gone]
