import re
import sys

import pytest
from msgspec import to_builtins

from ptdbench.measure.results import OtherLoad
from ptdbench.records.schema import Clocks
from ptdbench.report.remarks import reason
from ptdbench.report.table import closing_lines, render
from ptdbench.terminal import command
from tests.report.made import DDP, FSDP, failed, phased, repeated, run, thrice


def cells(text: str) -> list[list[str]]:
    """The rows of the table below its heading, split where two spaces or more stand."""
    lines = text.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("──"))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[rule + 1 :]]
    return [row for row in rows if re.fullmatch(r"\d+|\d+-\d+|-", row[0])]


def test_the_figures_of_a_row():
    (row,) = cells(render([run(tokens_per_second=41234.5)]))
    assert row == ["1", "ddp", "2", "16", "41,234", "20,617", "199 (12.3-1,234)", "1.5 GiB", "41.9%", "2.513", "ok"]


@pytest.mark.parametrize(("judged", "shown"), [
    ({"top1": 0.97222, "bits_per_byte": None, "loss": 0.5}, "97.2%"),
    ({"top1": None, "bits_per_byte": 2.21349, "loss": 0.5}, "2.213 b/B"),
    ({"top1": None, "bits_per_byte": None, "loss": 0.51249}, "0.512"),
])  # fmt: skip
def test_last_evaluation_is_beside_the_loss(judged, shown):
    text = render([run(evaluations=[{"top1": 0.1, "bits_per_byte": 9.9, "loss": 9.9}, judged]), run("pdp", 10.0)])
    assert "loss  val  status" in re.sub(r" {2,}", "  ", text)
    assert [row[-2:] for row in cells(text)] == [[shown, "ok"], ["-", "ok"]]


def test_the_fastest_comes_first_and_what_failed_last_whatever_it_did_before():
    diverged = run("hsdp", 9000.0, status="diverged")
    text = render([run("fsdp", 500.0), failed("single", "broken"), diverged, run("pdp", 2000.0), run("ddp", 1000.0)])
    assert [(row[0], row[1], row[5], row[-1]) for row in cells(text)] == [
        ("1-3", "pdp", "1.00x", "ok"), ("1-3", "ddp", "0.50x", "ok"), ("1-3", "fsdp", "0.25x", "ok"),
        ("-", "single", "-", "failed"), ("-", "hsdp", "-", "diverged"),
    ]  # fmt: skip


def test_a_reason_of_several_runs_is_told_once():
    runs = [run("ddp"), *(failed(parallel, "no held-out part") for parallel in ("pdp", "fsdp", "hsdp"))]
    last = failed("single", "another")
    assert render([*runs, last]).splitlines()[-2:] == [
        "pdp, fsdp and hsdp: failed on rank 1: RuntimeError: no held-out part",
        "single: failed on rank 1: RuntimeError: another",
    ]


def test_a_long_message_is_cut_and_what_stands_behind_it_is_whole():
    message, output = (
        "CUDA out of memory.\n  Tried to allocate " + 300 * "word ",
        "; its output is in /a/" + "long" * 30,
    )
    record = failed("ddp", message + output, "timeout")
    record.error.where = "mymodels.py:13 in forward"
    said = reason(record)
    assert said.startswith(f"timeout on rank 1: RuntimeError: {' '.join(message.split())[:900]}")
    where = "mymodels.py:13 in forward; the whole traceback is in outputs/sweep/ddp/traceback.txt"
    assert said.endswith(f" ...{output} at {where}")
    record.kind = "planned"  # by runs whose directories are gone
    assert reason(record).endswith("the whole traceback is in outputs/sweep/ddp/record.json")


def test_a_refusal_is_whole_and_has_no_rank_to_blame():
    problems = [f"model.heads={heads}: must divide width=128; try 2, 4, 8" for heads in range(99)]
    record = failed("ddp", "\n".join(problems), rank=-1)
    record.error.type = "ConfigError"
    assert reason(record) == f"failed: {'; '.join(problems)}"


@pytest.mark.parametrize(("kind", "message", "shown"), [
    ("Stopped", "stopped by SIGINT after step 3 of 9", "stopped by SIGINT after step 3 of 9"),
    ("CANCELLED", "SLURM ended job 7 on n1: CANCELLED", "SLURM ended job 7 on n1: CANCELLED"),
    ("OUT_OF_MEMORY", "SLURM ended job 7: FAILED", "OUT_OF_MEMORY: SLURM ended job 7: FAILED"),
    ("ValueError", "no value", "ValueError: no value"),
])  # fmt: skip
def test_a_type_that_the_message_says_is_not_repeated(kind, message, shown):
    record = failed("ddp", message, rank=-1)
    record.error.type = kind
    assert reason(record) == f"failed: {shown}"


OTHERS = "parallel=fsdp, activations=recompute, precision=bf16"
ACCUMULATING = {"micro_batch": 1, "accumulation": 4, "shard": 2, "pipeline": 1}
FRUGAL = {"parallel": "fsdp", "precision": "bf16", "layout": {"micro_batch": 1}}


@pytest.mark.parametrize(("fields", "tried"), [
    ({"launcher": "local"}, f"; try train.micro_batch=max, which finds what fits, {OTHERS}"),
    ({"launcher": "torchrun"}, f"; try the train.micro_batch that ptdbench plan finds, {OTHERS}"),
    ({"launcher": "srun", "config": {"cluster": {"submit": "wait"}}},
     "; try train.micro_batch=max, which finds what fits, parallel=fsdp, precision=bf16"),
    ({"launcher": "local", "micro_batch": {"asked": "max"}}, f"; try {OTHERS}"),
    (FRUGAL | {"micro_batch": {"asked": "max", "found": 1}, "config": {"eval": {"every": 10}}},
     "; try a smaller eval.micro_batch, as a search leaves evaluation out"),
    (FRUGAL, "; try activations=recompute"),
    (FRUGAL | {"config": {"activations": {"name": "recompute"}}}, ""),
    (FRUGAL | {"config": {"parallel": {"reduce_scatter_each_microbatch": False}}, "layout": ACCUMULATING},
     "; try parallel.reduce_scatter_each_microbatch=true"),
    (FRUGAL | {"config": {"parallel": {"reduce_scatter_each_microbatch": True}}, "layout": ACCUMULATING}, ""),
])  # fmt: skip
def test_out_of_memory_says_what_to_try(fields, tried):
    least = {"layout": {"micro_batch": 8}, "config": {"activations": {"name": "keep"}}}
    record = failed("ddp", "no room", "oom") | least | fields
    assert reason(record) == f"oom on rank 1: RuntimeError: no room{tried}"


def test_the_throughput_of_each_rank_stands_beside_that_of_all():
    assert "tokens/s/rank" not in render([run(world_size=1)], 200)
    text = render([run(tokens_per_second=1000.0, world_size=4), run("single", 300.0, world_size=1)], 200)
    assert [row[5] for row in cells(text)] == ["250", "-"]
    of_gpus = run(environment={"devices": ["H100"]})
    assert " tokens/s  tokens/s/GPU " in render([of_gpus], 200)


def test_models_have_tables_of_their_own():
    images = run("ddp", None, model="resnet18")
    text = render([run("fsdp"), images, run("ddp")])
    first, second = text.split("\n\n")
    assert first.startswith("gpt_tiny · 1,234,567 parameters · fp32\n")
    assert "tokens/s" in first
    assert len(cells(first)) == 2
    assert second.startswith("resnet18 ·")
    assert "samples/s" in second
    assert cells(second)[0][4] == "250"


class TestRepeats:
    """Rows of several runs each."""

    DDP = repeated("ddp", [1000.0, 1010.0, 990.0])
    FSDP = repeated("fsdp", [801.0, 807.0, 792.0])
    TIED = repeated("pdp", [802.0, 805.0, 794.0])

    def test_a_row_has_the_rank_the_runs_and_how_sure_its_figures_are(self):
        runs = [run for block in zip(self.FSDP, self.DDP, self.TIED, strict=True) for run in block]
        text = render(runs, 200)
        assert "#  runs  parallel" in text
        rows = [(row[0], row[1], row[2], row[-1]) for row in cells(text)]
        assert set(rows) == {("1", "3", "ddp", "ok"), ("2-3", "3", "pdp", "ok"), ("2-3", "3", "fsdp", "ok")}
        first, second, _ = cells(text)
        # deviations of 1 %, 0.95 % and 0.72 %, weighted by 2, 0.8 and 0.8 degrees of freedom: 0.93 %; the quantile of
        # Student's t with these 3.6 is 2.90, and 2.90 * 0.0093 / sqrt(3) is 1.6 %
        assert first[5:8] == ["1,000 ±1.6%", "500", "1.00x"]
        assert re.fullmatch(r"0\.80x \(0\.\d\d-0\.\d\d\)", second[7])

    def test_failed_runs_are_counted_and_the_reason_of_one_stands_below(self):
        error = failed("ddp", "CUDA out of memory")["error"]
        broken = self.DDP[2] | {"status": "oom", "metrics": None, "error": error}
        text = render([*self.DDP[:2], broken, *self.FSDP], 200)
        (row,) = [row for row in cells(text) if row[2] == "ddp"]
        assert (row[1], row[-1]) == ("3", "2 ok, 1 oom")
        assert "±" not in " ".join(row)
        assert [line for line in text.splitlines() if line.startswith("ddp: oom on rank 1: RuntimeError: CUDA out of")]

    @pytest.mark.parametrize("width", [60, 80, 100, 140])
    def test_where_there_is_no_room_the_steps_of_one_run_go_before_the_order(self, width):
        text = render([*self.DDP, *self.FSDP], width)
        assert max(map(len, text.splitlines())) <= max(width, 70)
        assert ("vs best" in text.splitlines()[1]) == (width >= 80)
        assert ("step ms" in text.splitlines()[1]) == (width >= 100)
        assert "±" in text


def test_common_remarks_appear_once():
    mfu = "a CPU has no data-sheet peak"
    known = {"metrics": {**run()["metrics"], "mfu": None, "mfu_reason": mfu}}
    text = render([run("ddp", **known), run("fsdp", **known), run("pdp", **known)])
    assert "MFU " not in text  # the column would be empty
    assert text.count(mfu) == 1


LARGE = run("pdp", 123456789.0, world_size=1024, global_batch=16384, layout={"replicate": 128, "pipeline": 8})


def test_incomparable_runs_have_separate_tables():
    """Models of another size, and other global batches, whose samples or tokens are other work."""
    runs = [run(one, rate, global_batch=batch) for batch, rate in ((16, 9.0), (4, 5.0)) for one in ("ddp", "fsdp")]
    text = render([*runs, run("pdp", 99.0, parameters=7, config={"model": {"depth": 1}})], 200)
    titles = "gpt_tiny · 1,234,567 parameters · fp32 · batch {}", "gpt_tiny · 7 parameters · fp32 · batch 16"
    tables = [table.splitlines() for table in text.split("\n\n")]
    assert [table[0] for table in tables] == [titles[0].format(16), titles[0].format(4), titles[1]]
    assert [[row.split()[0] for row in table[3:5]] for table in tables[:2]] == [["1-2", "1-2"]] * 2
    assert ["vs best" in table[1] for table in tables] == [True, True, False]


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_figures_are_whole_at_any_width(width):
    text = render([LARGE, run("ddp", global_batch=16384)], width)
    for figure in ("123,456,789", "199 (12.3-1,234)", "41.9%", "2.513", "1024", "16384", "status"):
        assert figure in text
    assert ("1.5 GiB" in text) == (width >= 100)
    assert ("left out in 80 columns: vs best, memory" in text.splitlines()) == (width == 80)
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 140])
def test_a_table_is_whole_in_its_columns(width):
    """As on two CPU cores: there is no MFU, and all runs have the same ranks and batch."""
    metrics = {**run()["metrics"], "mfu": None}
    pipeline = run("pdp", layout={"pipeline": 2}, metrics=metrics)
    text = render([pipeline, run("ddp", metrics=metrics), failed("fsdp", "word " * 100, "preempted")], width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width - 20  # the reason takes the room
    assert "…" not in text
    assert (lines[0].endswith("fp32 · 2 ranks · batch 16"), "ranks  batch" in text) == (width == 80, width == 140)
    assert "vs best" in text


def test_a_title_counts_a_single_rank():
    one = {"world_size": 1, "metrics": {**run()["metrics"], "mfu": None}}
    text = render([run("pdp", **one), run("ddp", **one), failed("fsdp", "word " * 100) | one], 60)
    assert " · 1 rank · " in text.splitlines()[0]


def test_closing_lines_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep, single = tmp_path / "out puts", tmp_path / "out puts" / "0"
    single.mkdir(parents=True)
    assert closing_lines(single, [run()]) == "records      'out puts/0'/record.json"
    (single / "events.out.tfevents.0").touch()
    (single / "trace.json.gz").write_bytes(bytes(2048))
    assert closing_lines(single, [DDP]).splitlines() == [
        "records      'out puts/0'/record.json", f"phases       {command('explain')} 'out puts/0'",
        "trace        'out puts/0'/trace.json.gz (2 KiB)", "             (open it at https://ui.perfetto.dev)",
        "TensorBoard  tensorboard --logdir 'out puts/0'",
    ]  # fmt: skip
    (sweep / "results.jsonl").touch()
    assert closing_lines(sweep, [run(), DDP]).splitlines() == [
        "records      'out puts'/results.jsonl", f"phases       {command('explain')} 'out puts'",
        f"report       {command('report')} 'out puts'", "trace        'out puts'/*/trace.json.gz (2 KiB)",
        "             (open it at https://ui.perfetto.dev)", "TensorBoard  tensorboard --logdir 'out puts'",
        "             (HPARAMS tab: sort by summary/throughput)",
    ]  # fmt: skip
    (sweep / "nested").mkdir()
    single.rename(sweep / "nested" / "0")
    assert closing_lines(sweep, [run()]).splitlines()[2:5] == [
        "trace        'out puts'/*/*/trace.json.gz (2 KiB)",
        "             (open it at https://ui.perfetto.dev)",
        "TensorBoard  tensorboard --logdir 'out puts'",
    ]


def test_the_share_of_the_ceiling_is_a_column_where_any_run_has_one():
    known = run("fsdp", 500.0)
    known.metrics.share_of_ceiling = 0.5249
    assert "% of GEMM" not in render([run("ddp")])
    text = render([run("ddp", 1000.0), known], 120)
    assert "MFU  % of GEMM   loss" in text
    assert [row[8:10] for row in cells(text)] == [["41.9%", "-"], ["41.9%", "52.5%"]]


def of(**metrics):
    """Fields of a run with these metrics."""
    return {"metrics": run()["metrics"] | {"ceiling_flops_per_second": 30.1e9} | metrics}


def held_back(*ranks):
    """Fields of a run whose GPUs were held back for shares of its time, by what causes."""
    clocks = [to_builtins(Clocks(rank, causes)) for rank, causes in enumerate(ranks)]
    return {"hardware": {"clocks": clocks}}


def beside(*taken, **gpus):
    """Fields of a run on nodes of 2 cores of which other processes took some."""
    loads = [OtherLoad(f"n{node}", 2, cores, gpus.get("gpu_ranks", []), bool(gpus)) for node, cores in enumerate(taken)]
    return {"hardware": {"other_load": to_builtins(loads)}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        # of the same training
        ({"final_loss": 2.7}, ["last loss differs from ddp, relative: fsdp 0.038"]),
        ({"final_loss": 2.6001}, []),
        ({"final_loss": None}, []),
        ({"final_loss": 2.7, "steps": 59}, []),
        ({"final_loss": 2.7, "config": {"seed": 1, "parallel": {"name": "fsdp"}}}, []),
        ({"final_loss": 2.7, "status": "diverged"}, ["fsdp: diverged: no reason on record"]),
        (of(share_of_ceiling=1.12),
         ["fsdp: ceiling of 30.1 GFLOP/s passed; workload=matmul measures it again"]),
        (of(share_of_ceiling=0.5), []),
        (of(share_of_ceiling=2.0, ceiling_flops_per_second=None), []),
        *((of(data_wait_share=share), []) for share in (None, 0.0, 0.049)),
        (of(data_wait_share=0.125), ["fsdp: 12% of the steps' time was spent waiting for data"]),
        ({"remarks": {"cut_short": "70 of 100 steps: more would exceed train.max_minutes=10"}},
         ["fsdp: took 70 of 100 steps: more would exceed train.max_minutes=10"]),
        ({"remarks": {"pipeline": "stage 0 of 2 with 97% of the weights"}},
         ["fsdp: stage 0 of 2 with 97% of the weights"]),
        ({"remarks": {"checkpoints": ["step 3: not saved", "step 6: not saved", "step 9: not saved"]}},
         ["fsdp: checkpoints: step 3: not saved; 2 more on record"]),
        ({"kernels": "torch", "remarks": {"kernels": "kernels=torch, except for zero1"}},
         ["fsdp: kernels=torch, except for zero1"]),
        ({"hardware": None}, []),
        (held_back(None, {"power limit": 0.01}), []),
        (held_back({}, {"power limit": 0.12, "sync boost": 0.0}),
         ["fsdp: rank 1's GPU was held back for 12% of the time: power limit"]),
        (held_back({"power limit": 0.12}, {"power limit": 0.02, "temperature limit": 0.3}, {"board limit": 0.02}),
         ["fsdp: rank 1's GPU was held back for 30% of the time: temperature limit, and 2 others by less"]),
        (beside(0.09, None), []),
        (beside(0.4, 1.26, 0.0), ["other processes took 1.3 of 2 cores during fsdp"]),
        (beside(1.5, gpu_ranks=[1]), ["other processes use the GPU of rank 1 during fsdp"]),
    ],
)  # fmt: skip
def test_remarks_below_the_table(changes, said):
    def trained(parallel, **changes):
        config = {"seed": 0, "parallel": {"name": parallel}}
        return run(parallel, **{"final_loss": 2.6, "steps": 60, "config": config} | changes)

    lines = render([trained("ddp"), trained("fsdp", **changes)], 300).splitlines()[5:]
    assert [line for line in lines if not line.startswith("one run each")] == said


def test_other_load_is_told_once_for_all_rows():
    ddp, fsdp = (repeated(name, [1000.0, 1010.0, 990.0]) for name in ("ddp", "fsdp"))
    loads = [beside(0.5), {}, beside(0.2), beside(0.7), {}, {}]
    runs = [one | fields for one, fields in zip([*ddp, *fsdp], loads, strict=True)]
    said = [line for line in render(runs, 300).splitlines() if "processes" in line]
    assert said == ["other processes took 0.7 of 2 cores, at most, during ddp (2 of 3 runs) and fsdp (1 of 3 runs)"]


def test_runs_not_measured_in_turns_are_named():
    """As where a configuration failed in every block, was mended, and ran the next day."""
    ddp, fsdp, pdp = (repeated(name, [1000.0, 1010.0, 990.0]) for name in ("ddp", "fsdp", "pdp"))
    for one, hours in ((ddp, (1, 4, 5)), (fsdp, (2, 3, 6)), (pdp, (20, 21, 22))):
        for record, hour in zip(one, hours, strict=True):
            record.started = f"2026-11-26T{hour:02}:00:00+00:00"
    said = "pdp: measured after ddp and fsdp, not in turns: a machine that has changed since counts"
    assert [line for line in render([*ddp, *fsdp, *pdp], 300).splitlines() if "turns" in line] == [said]
    ddp[0].started = "at noon"  # a record is anybody's text, and here no reason to fail
    assert "turns" not in render([*ddp, *fsdp, *pdp], 300)
    single = [run(name, started=one[0].started) for name, one in (("ddp", ddp), ("pdp", pdp))]
    assert "turns" not in render([*ddp, *fsdp], 300) + render(single, 300)


def test_differing_devices_are_named():
    machines = {"ddp": ["A100", "A100"], "fsdp": ["H100"], "pdp": [], "hsdp": ["H100"]}
    runs = [run(name, environment={"devices": gpus, "cpu": "Xeon"}) for name, gpus in machines.items()]
    broken = failed("tp", "broken") | {"environment": {"devices": ["V100"]}}
    said = "ranked across devices: ddp on A100; fsdp and hsdp on H100; pdp on Xeon"
    assert said in render([*runs, broken], 300).splitlines()
    assert "across" not in render([runs[1], runs[3], broken, run("single")], 300)


class TestWhy:
    def test_the_step_of_a_row_is_the_one_that_is_explained(self):
        """The mean of both, as throughput is; the medians are in another order."""
        times = {"ddp": {"mean": 0.076, "median": 0.149}, "fsdp": {"mean": 0.12, "median": 0.126}}
        runs = [
            one | {"metrics": one["metrics"] | {"step_seconds": {"p5": 0.07, "p95": 0.2, **times[one.parallel]}}}
            for one in (DDP, FSDP)
        ]
        text = render([one for run in runs for one in thrice(run)], 300)
        assert [row[8].split()[0] for row in cells(text)] == ["76.0", "120"]
        assert "fsdp +44 ms vs ddp: " in text

    def test_five_lines_at_most(self):
        runs = [phased(f"p{n}", 76 + 5 * n, {"forward": [70 + 5 * n] * 2, "backward": [6] * 2}) for n in range(8)]
        lines = [
            line
            for line in render([one for run in runs for one in thrice(run)], 300).splitlines()
            if " ms vs p0: " in line
        ]
        assert [line.split()[0] for line in lines] == ["p1", "p2", "p3", "p4", "p5"]

    def test_runs_are_told_apart_by_what_other_rows_have_in_columns(self):
        text = render([*thrice(DDP), *thrice(DDP | {"world_size": 4, "config": {}}), *thrice(FSDP)], 300)
        assert "fsdp +44 ms vs ddp 2 ranks: " in text


def guest(target, found, **changes):
    config = {"workload": {"name": "guest", "_target_": target}}
    return run(model=None, workload="guest", config=config, guest=found, directory="outputs/guest", **changes)


class TestOtherWorkloads:
    @pytest.mark.parametrize(
        "target",
        ["notes.W", "ptdbench.workloads.notes.W", "ptdbench.workloads.hello.os", "os.system", "", ".", 7, None, ["a"]],
    )
    def test_a_record_names_no_code_that_is_run(self, target, tmp_path, monkeypatch):
        (tmp_path / "notes.py").write_text("raise SystemExit('somebody else is here')")
        monkeypatch.syspath_prepend(tmp_path)
        assert render([guest(target, {"answer": [4, "\x1b[2J"]})], 90).splitlines() == [
            "{", ' "answer": [', "  4,", '  "\\u001b[2J"', " ]", "}",
        ]  # fmt: skip
        assert "notes" not in sys.modules

    def test_of_many_results_some_are_shown(self):
        lines = render([guest("notes.W", [*range(1000), "x" * 10**6])], 90).splitlines()
        assert (len(lines), lines[-1]) == (61, "… and 943 lines more in record.json")
        assert max(map(len, render([guest("notes.W", ["x" * 10**6])], 90).splitlines())) < 250

    def test_a_failed_workload_has_its_results_and_its_reason(self):
        error = {"rank": 1, "type": "RuntimeError", "message": "no answer", "traceback": ""}
        why = "guest: failed on rank 1: RuntimeError: no answer"
        assert render([guest("notes.W", {}, status="failed", error=error)], 100) == why
        lines = render([guest("notes.W", {"question": 1}, status="failed", error=error)], 100).splitlines()
        assert lines == ["{", ' "question": 1', "}", why]

    def test_results_of_another_workload_with_our_name_are_shown_as_recorded(self):
        assert render([run(model=None, workload="hello", hello={"ranks": 2})], 90) == '{\n "ranks": 2\n}'
