"""``ptdbench plan`` as it is typed: on virtual GPUs, and where there are none."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import psutil
import pytest

from ptdbench.launch.local import Stopped
from ptdbench.measure.memory import HostMemory
from ptdbench.planning import memory_plan, plans
from ptdbench.problems import ConfigError
from ptdbench.profiling.events import NCCL_BUFFERS
from ptdbench.records import record, store
from ptdbench.records.run_record import typed
from ptdbench.report import table
from ptdbench.setup.config import Config
from ptdbench.units import memory_text
from tests.conftest import ROOT, outputs
from tests.programs import call
from tests.refusals import Abridged, refusal_of

SMALL = (
    "model=gpt_tiny", "model.layers=2", "model.width=64", "model.heads=2", "model.sequence_length=32",
    "data=synthetic_tokens", "cluster.ranks_per_node=2",
)  # fmt: skip
#: An H100 of so little memory that of these models some micro-batches do not fit.
TIGHT = ("virtual=h100", "virtual.gpu.context=1048576")


def plan(environ: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What a person types in a shell."""
    return call(
        sys.executable, "-m", "ptdbench", "plan", *words, cwd=folder, environ={**environ, "COLUMNS": "200"}, timeout=300
    )


def small(*words: str) -> Config:
    """The configuration of a small model on GPUs that are not there."""
    (asked,) = plans.composed([*SMALL, "virtual=h100", *words]).configs
    return asked


def nothing(*_: object) -> None:
    raise AssertionError("nothing is to be carried out")


def leaves(status: str = "ok", **fields: Any) -> Callable[..., None]:
    """What carries a run out, or would, and leaves a record with these fields."""

    def carry_out(where: Path) -> None:
        store.write_record(where, store.load_record(where) | {"status": status, "error": None} | fields)

    return carry_out


def allocating(size: int) -> Callable[..., None]:
    virtual = {"ranks": [0], "allocated_bytes": [size], "reserved_bytes": [size]}
    return leaves(virtual=virtual, memory={"ranks": {}})


def planned(asked: Config, carry_out: Callable[..., None] = nothing) -> dict[str, Any]:
    return memory_plan.plan(memory_plan.PlanRequest(asked, False, "toy", carry_out))


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is refused where it would be carried out."""
    monkeypatch.setattr("ptdbench.setup.run_spec.place", lambda *_: None)


def records_of(folder: Path) -> list[dict[str, Any]]:
    (directory,) = outputs(folder)
    return [one.written for one in store.read_results(directory)]


@pytest.mark.ranks
def test_plan_equals_the_virtual_run_and_is_cached(environ, tmp_path):
    words = (*SMALL, *TIGHT, "virtual.gpu.memory=457000000", "train.micro_batch=max", "train.global_batch=256")
    with tempfile.TemporaryDirectory() as folder:  # its path is short, as those of sockets must be
        done = plan({**environ, "TMPDIR": folder}, tmp_path, "-m", *words, "parallel=fsdp", "parallel.shard=2,3")
        assert not [*Path(folder).glob("pymp-*")]  # each process that plans had one
    assert done.returncode == 0, done.stderr
    fits, *refused = records_of(tmp_path)
    assert {one["status"] for one in refused} == {"failed"}
    found = fits["plan"]
    assert fits["kind"] == "planned"
    assert fits["layout"]["micro_batch"] == found["largest_micro_batch"]
    assert fits["layout"]["global_batch"] == 256
    by_size = {one["micro_batch"]: one for one in found["tries"]}
    assert by_size[found["largest_micro_batch"]]["fits"]
    assert found["needed_bytes"] <= found["room_bytes"] == int(0.9 * 457_000_000)
    assert found["needed_bytes"] == found["reserved_bytes"] + 1048576 + NCCL_BUFFERS
    assert found["stands_for"] == [2]
    kinds = {kind: sizes[0] for kind, sizes in fits["memory"]["ranks"].items()}
    assert kinds["weights"] == found["state"][0]["weights"]
    assert f" {found['largest_micro_batch']}\n" in done.stdout
    step = fits["predicted"]
    for parts in (step["parts"], step["phases"]):
        assert sum(parts.values()) == pytest.approx(step["step_seconds"], rel=1e-3)
    assert step["high"] / step["step_seconds"] == pytest.approx(step["step_seconds"] / step["low"]) == 1.25
    assert step["tokens_per_second"] == pytest.approx(256 * 32 / step["step_seconds"])
    of_token = 6 * (12 * 2 * 64**2 + fits["config"]["model"]["vocabulary"] * 64) + 12 * 2 * 64 * 32
    assert step["mfu"] == pytest.approx(step["tokens_per_second"] * of_token / 2 / 66.9e12)  # in fp32, not in TF32
    assert f"  {step['bound_by']}  " in done.stdout

    # A run of it takes what was planned. Its loss is computed in chunks, the smaller the less memory the GPU has.
    typed = [f"train.micro_batch={found['largest_micro_batch']}" if "micro_batch" in word else word for word in words]
    short = ("parallel=fsdp", "train.steps=2", "train.warmup_steps=0", "profile.steps=0")
    command = [sys.executable, str(ROOT / "train.py"), *typed, *short, f"hydra.run.dir={tmp_path}/run"]
    subprocess.run(command, env=environ, check=True)
    assert {*store.load_record(tmp_path / "run")["virtual"]["allocated_bytes"]} == {found["allocated_bytes"]}

    again = plan(environ, tmp_path, *words, "parallel=fsdp", "parallel.shard=2", "--json")
    (known,) = json.loads(again.stdout)
    assert known["plan"] == found
    assert "step" not in again.stderr  # nothing was carried out


@pytest.mark.ranks
def test_a_single_layout_is_kept_too(environ, tmp_path):
    """By a process that imports torch, which changes the environment, and carries the ranks out itself."""
    words = (*SMALL, *TIGHT, "parallel=ddp", "train.micro_batch=4")
    made, again = plan(environ, tmp_path, *words), plan(environ, tmp_path, *words)
    assert ("step" in made.stderr, "step" in again.stderr) == (True, False)
    said = "\ncached       1 row planned earlier (plan --again plans anew)\n"
    assert (said in made.stdout, said in again.stdout) == (False, True)


@pytest.mark.ranks
@pytest.mark.thorough
def test_oversized_plan_says_what_saves_memory(environ, tmp_path):
    """Of 2,048 samples one tensor is larger than 9/8 of the GPU, and than any that torch would place on it."""
    words = (*SMALL, *TIGHT, "virtual.gpu.memory=720000000", "parallel=ddp", "model.width=1024")
    done = plan(environ, tmp_path, *words, "train.micro_batch=1,2048", "train.global_batch=4096")
    assert done.returncode == 1
    smallest, largest = records_of(tmp_path)
    assert (smallest["status"], largest["status"]) == ("oom", "oom")
    assert "are weights, gradients and optimizer state; try parallel=fsdp, " in smallest["error"]["message"]
    assert "micro-batch 2048 needs more than 772 MiB" in largest["error"]["message"]


@pytest.mark.ranks
@pytest.mark.thorough
def test_gradients_that_accumulate_in_shards_need_less_and_are_advised(environ, tmp_path):
    words = (
        *SMALL, *TIGHT, "model.width=1024", "model.layers=4", "parallel=fsdp", "train.micro_batch=1",
        "train.global_batch=8",
    )  # fmt: skip
    options = ("virtual.gpu.memory=570000000", "parallel.reduce_scatter_each_microbatch=true,false")
    plan(environ, tmp_path, *words, *options)
    in_shards, whole = records_of(tmp_path)
    assert in_shards["plan"]["needed_bytes"] < whole["plan"]["needed_bytes"]
    assert in_shards["error"]["message"].endswith(
        "; try more cluster.nodes, activations=recompute, precision=bf16, parallel.tensor or parallel.context"
    )
    savings = "; try more cluster.nodes, parallel.reduce_scatter_each_microbatch=true, activations=recompute"
    assert savings in whole["error"]["message"]


@pytest.mark.ranks
@pytest.mark.thorough
def test_one_pass_fits_where_smaller_micro_batches_hold_whole_gradients(environ, tmp_path):
    """The same answer whatever was asked for."""
    words = (*SMALL, "model.width=1024", "model.layers=8", "parallel=fsdp", "precision=bf16", "virtual=h100")
    batch = ("cluster.ranks_per_node=8", "train.global_batch=16", "train.micro_batch=1,2,max")
    done = plan(environ, tmp_path, *words, *batch, "virtual.gpu.memory=1670000000")
    one, *others = records_of(tmp_path)
    assert [plan["plan"]["largest_micro_batch"] for plan in (one, *others)] == [2, 2, 2], done.stdout
    assert [plan["layout"]["micro_batch"] for plan in others] == [2, 2]
    assert [plan["plan"]["fits"] for plan in (one, *others)] == [False, True, True]
    assert one["error"]["message"].endswith("; train.micro_batch=2 fits")


def check_state_alone(ddp: dict[str, Any], fsdp: dict[str, Any], copies: int) -> None:
    (whole, *_), (half, *_) = ddp["plan"]["state"], fsdp["plan"]["state"]
    assert whole["weights"] == 4 * ddp["parameters"] == 2 * half["weights"]
    assert ddp["plan"]["needed_bytes"] == copies * sum(whole.values())
    assert (ddp["status"], ddp["plan"]["fits"]) == ("ok", None)


def test_without_a_compiler_for_virtual_gpus_the_training_state_is_known(environ, tmp_path):
    without_compiler = {**environ, "PATH": str(tmp_path / "empty"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = plan(without_compiler, tmp_path, *SMALL, "virtual=h100", "parallel=ddp,fsdp")
    assert done.returncode == 0, done.stderr
    check_state_alone(*records_of(tmp_path), copies=1)
    assert "has no cc, and a virtual GPU needs a C compiler" in done.stdout


def test_without_a_gpu_the_training_state_is_known():
    """Both ranks are on this machine."""
    configs = plans.composed([*SMALL, "device=cpu", "parallel=ddp,fsdp"]).configs
    made = [record.begin(asked.resolved, Path(), {}) | planned(asked) for asked in configs]
    check_state_alone(*made, copies=2)
    assert "only the training state is known" in table.of_plans([*map(typed, made)], 200)


def test_a_command_line_that_is_no_plan_is_one_line():
    with pytest.raises(ConfigError, match=re.escape("model.heads=interval(1,2): is a range")):
        plans.composed([*SMALL, "virtual=h100", "model.heads=interval(1,2)"])


@pytest.mark.parametrize(
    ("shape", "ranks"), [("gpus_per_node=4", 4), ("ranks_per_node=2", 2), ("gpus_per_node=0", "auto")]
)
def test_the_shape_of_slurm_jobs_is_planned(shape, ranks):
    words = ["model=toy", "virtual=h100", "cluster=slurm", "cluster.time_minutes=5", f"cluster.{shape}"]
    (read,) = plans.composed([*words, "cluster.nodes=3"]).configs
    assert (read.cluster.name, read.cluster.nodes, read.cluster.ranks_per_node) == ("local", 3, ranks)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("workload=hello", "workload=hello: only training can be planned; omit it"),
        ("parallel.tensor=3", "parallel.tensor=3: "),
        ("virtual.gpu.costs=/none", "virtual.gpu.costs=/none: it is no file of make gpu-calibrate: "),
        ("train.micro_batch=3", "train.micro_batch=3: must divide a replica's share of the batch, 8; try 1, 2, 4"),
    ],
)
def test_a_layout_that_cannot_be_is_one_line(word, said):
    asked = small("parallel=tp" if "tensor" in word else "parallel=fsdp", word)
    assert refusal_of(planned, asked).splitlines() == [Abridged(f"{said}…")]


@pytest.mark.parametrize(("kind", "status"), [("OutOfMemoryError", "oom"), ("MemoryError", "failed")])
@pytest.mark.usefixtures("anywhere")
def test_the_memory_of_this_machine_tells_nothing_of_a_gpu(kind, status):
    died = leaves("oom", error={"rank": 0, "type": kind, "message": "", "traceback": ""})
    asked = small("parallel=ddp", "train.micro_batch=4")
    made = plans._fields(plans._Uncached(asked, False, "toy", None), died, 1)
    assert (made["status"], "plan" in made) == (status, status == "oom")


@pytest.mark.usefixtures("anywhere")
def test_samples_that_wait_for_their_pass_are_in_what_is_needed():
    """Of a replica's 8, two are carried out, one a pass."""
    found = planned(small("parallel=ddp", "train.global_batch=16", "train.micro_batch=1"), allocating(20))["plan"]
    assert found["outside"]["samples"] == (8 - 2) * 2 * 32 * 8
    assert found["needed_bytes"] == 20 + sum(found["outside"].values())
    assert {*found["sources"]} == {*found["outside"]}


@pytest.mark.usefixtures("anywhere")
def test_only_the_try_that_decided_is_profiled():
    """More is reserved than there is, and less allocated: the limit of the GPU decides."""
    asked, tries = small("parallel=ddp", "train.global_batch=2", "train.micro_batch=max"), list[tuple[bool, int]]()

    def carry_out(where: Path) -> None:
        config = store.load_record(where)["config"]
        tries.append((config["virtual"]["gpu"]["allocatable"] == 1 << 40, config["profile"]["steps"]))
        leaves(virtual={"ranks": [0], "allocated_bytes": [20], "reserved_bytes": [1 << 39]})(where)

    assert planned(asked, carry_out)["plan"]["largest_micro_batch"] == 1
    assert tries == [(True, 0), (False, 0), (False, 1)]


@pytest.mark.usefixtures("anywhere")
def test_another_device_with_the_same_kernels_uses_the_recordings():
    """An H100's chunk of the loss has at most 16,862 rows of 50,304, so that 527 samples of 32 depend on its memory."""

    def made(gpu: str, carry_out: Callable[..., None], again: bool = False, samples: int = 526) -> dict[str, Any]:
        sized = (
            "precision=bf16", "model.vocabulary=50304", f"train.global_batch={2 * samples}",
            f"train.micro_batch={samples}",
        )  # fmt: skip
        asked = small("parallel=ddp", *sized, f"virtual={gpu}")
        request = memory_plan.PlanRequest(asked, False, "toy", carry_out, key={"code": "1"}, again=again)
        return memory_plan.plan(request)

    first, other = made("h100", allocating(20)), made("h200", nothing)
    assert other["plan"]["needed_bytes"] == first["plan"]["needed_bytes"]
    assert other["plan"]["capacity_of"] == "virtual NVIDIA H200"
    for gpu, again, samples in (("a100", False, 526), ("h100", True, 526), ("h100", False, 527)):
        with pytest.raises(AssertionError, match="nothing is to be carried out"):
            made(gpu, nothing, again, samples)


@pytest.mark.parametrize(("words", "reason"), [
    (("cluster.nodes=2",), "messages between nodes have no costs yet"),
    (("virtual=l4",), "no costs of NVIDIA L4; there are those of NVIDIA H200, "),
    (
        ("parallel=pdp", "model.layers=8", "cluster.ranks_per_node=8", "parallel.pipeline=8"),
        "not all stages of the ",
    ),
])  # fmt: skip
@pytest.mark.usefixtures("anywhere")
def test_a_plan_without_a_time_says_why(words, reason):
    made = planned(small("parallel=ddp", "train.global_batch=64", *words), allocating(20))
    assert made["predicted"]["reason"].startswith(reason)
    assert made["plan"]["fits"]


@pytest.mark.parametrize(("words", "savings"), [
    (("parallel=ddp",), "parallel=fsdp, activations=recompute, precision=bf16, parallel.tensor or …"),
    (("parallel=fsdp", "activations=recompute", "precision=bf16"), "more cluster.nodes, parallel.tensor or …"),
    (("parallel=fsdp", "train.global_batch=16"), "more …, parallel.reduce_scatter_each_microbatch=true, activations=…"),
])  # fmt: skip
@pytest.mark.usefixtures("anywhere")
def test_a_plan_that_does_not_fit_says_how_much_is_state_and_what_saves_memory(words, savings):
    words = ("train.global_batch=2", "train.micro_batch=1", "memory_reserve=0", *words)
    plan = planned(small(*words), allocating(20 << 20))["plan"]
    state = sum(plan["state"][0].values())
    tight = f"virtual.gpu.memory={plan['needed_bytes'] - state // 3}"
    made = planned(small(*words, tight), allocating(20 << 20))
    message = f"…; none fits: {memory_text(state)} are weights, gradients and optimizer state; try {savings}"
    assert made["error"]["message"] == Abridged(message)


@pytest.mark.usefixtures("anywhere")
def test_training_state_in_the_memory_of_hosts_is_carried_out_only_where_this_one_has_it(monkeypatch):
    monkeypatch.setattr(memory_plan, "host_memory", lambda: HostMemory(1 << 40, 100))
    asked = small("parallel=fsdp", "offload=optimizer_and_weights")
    made = planned(asked)
    assert (made["status"], made["plan"]["fits"], made["plan"].get("capacity_bytes")) == ("ok", None, None)
    assert "but this machine has 0 MiB to run one" in made["plan"]["reason"]
    shown = table.of_plans([typed(record.begin(asked.resolved, Path(), {}) | made)], 200)
    assert "of a rank are in host memory, which is compared with nothing" in shown


def test_editable_packages_may_change(monkeypatch, tmp_path):
    """A package installed editable has a version, which stays as its files change."""
    (tmp_path / "edited_by_somebody.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert plans._may_change("edited_by_somebody")
    assert plans._may_change("not_there_at_all")
    assert not plans._may_change("torch")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The cache key of a small model with more options, as of a new process in a folder of one's own."""
    monkeypatch.chdir(tmp_path)

    def of(*words: str) -> Any:
        plans._stamp.cache_clear()
        return plans._key(small("parallel=ddp", *words), False)

    return of


@pytest.mark.parametrize("option", ["./cfg", "cfg/deep/config.json", "{tmp}/cfg"])
def test_the_key_has_the_files_that_options_name(key, tmp_path, option):
    file = tmp_path / "cfg" / "deep" / "config.json"
    file.parent.mkdir(parents=True)
    words = ("+model.config._target_=torch.nn.X.from_pretrained", f"+model.config.name={option.format(tmp=tmp_path)}")
    file.write_text("2 layers")
    os.utime(file, (1, 1))
    made = key(*words)
    assert made
    assert made == key(*words)
    file.write_text("9 layers")
    os.utime(file, (1, 1))
    assert key(*words) != made


def test_costs_measured_on_a_gpu_are_in_the_key_of_a_plan_and_not_in_that_of_its_tries(key, tmp_path):
    path = tmp_path / "costs.json"
    path.touch()
    made = key(f"virtual.gpu.costs={path}")
    assert str(path) in made["files"]
    assert str(path) not in plans._of_tries(made, small("parallel=ddp", f"virtual.gpu.costs={path}"))["files"]


def test_the_key_has_the_files_of_a_package_that_keeps_its_version(key, monkeypatch, tmp_path):
    sizes = tmp_path / "site-packages" / "somebodys_models" / "sizes.yaml"
    sizes.parent.mkdir(parents=True)
    (sizes.parent / "__init__.py").touch()
    sizes.write_text("layers: 2")
    monkeypatch.syspath_prepend(sizes.parents[1])
    made = key("+model.block._target_=somebodys_models.Block")
    assert made == key("+model.block._target_=somebodys_models.Block")
    sizes.write_text("layers: 12")
    assert made != key("+model.block._target_=somebodys_models.Block")


@pytest.mark.parametrize("words", [
    ("+model.of._target_=torch.nn.X.from_pretrained", "+model.of.name=somebody/model"),  # in a cache of its own
    ("+model.of._target_=torch.hub.load", "+model.of.repo_or_dir=."),  # its code may read more
    ("+model.of.folder=.",),  # with more files than are looked at
])  # fmt: skip
def test_plans_of_changeable_inputs_are_not_cached(key, monkeypatch, tmp_path, words):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    monkeypatch.setattr(plans, "_MOST_FILES", 1)
    assert key() is not None
    assert key(*words) is None


def test_a_plan_that_is_stopped_has_what_is_done(monkeypatch, tmp_path, capsys):
    def made(*_: object) -> Iterator[dict[str, Any]]:
        yield {"status": "ok", "predicted": {"tokens_per_second": 2000.0}}
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(plans, "_made", made)
    words = [*SMALL, "parallel=ddp,fsdp", f"hydra.sweep.dir={tmp_path}"]
    planned = plans.make(plans.composed(words), words, True, nothing, nothing)
    assert [(one["parallel"], one["status"]) for one in planned.records] == [("ddp", "ok")]
    assert str(planned.stopped) == "stopped by SIGINT"
    assert "fastest so far: gpt_tiny_ddp, 2,000 tokens/s predicted\n" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "factor"), [
    ("cluster.ranks_per_node=2 parallel=pdp parallel.microbatches=11", 2 * 11),
    ("parallel=hsdp parallel.replicate=11 parallel.shard=13", 11 * 13),
    ("parallel=ddp parallel.replicate=0", 1),  # which is refused by itself
])  # fmt: skip
def test_a_batch_that_all_ranks_can_divide_is_found_where_the_nodes_are_not_given(words, factor):
    (asked,) = plans.composed(["model=toy", *words.split()]).configs
    assert asked.cluster.nodes == "auto"
    assert memory_plan._with_any_batch(asked).train.global_batch == factor * memory_plan._ANY_BATCH


@pytest.mark.ranks
def test_a_plan_that_is_stopped_leaves_no_process(environ, tmp_path):
    """Layouts are planned by processes of their own, each of which has started a server and ranks."""
    words = (*SMALL, *TIGHT, "parallel=ddp,fsdp,tp", "train.micro_batch=max")
    command = [sys.executable, "-m", "ptdbench", "plan", *words]
    variables = {**environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as process:
        process.stderr.readline()  # of a run that one of them has carried out
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) > 2
        process.terminate()
        assert process.stderr.read().endswith("stopped by SIGTERM\n")
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(family, 10)[1]


def uncached(*titles: str) -> list[plans._Uncached]:
    return [plans._Uncached(None, False, title, None) for title in titles]  # type: ignore[arg-type]


def test_a_process_that_plans_and_dies_costs_its_plan_and_no_other(monkeypatch):
    """As of the kernel, for want of memory: the others are planned one by one, in processes of their own."""
    pools = []

    def in_pool(left: list[plans._Uncached], processes: int, *_: object) -> Iterator[dict[str, Any]]:
        pools.append(([one.title for one in left], processes))
        for one in left:
            if one.title == "dies":
                raise BrokenProcessPool("abruptly")
            yield {"status": "ok"}

    monkeypatch.setattr(plans, "host_memory", lambda: HostMemory(1 << 40, 1 << 40))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(plans, "_in_pool", in_pool)
    ok, died, *others = plans._made(uncached("a", "dies", "b", "c"), len, len)  # type: ignore[arg-type]
    assert pools == [(["a", "dies", "b", "c"], 2), (["dies", "b", "c"], 1), (["b", "c"], 1)]
    assert [one["status"] for one in (ok, died, *others)] == ["ok", "failed", "ok", "ok"]
    assert died["error"]["type"] == "BrokenProcessPool"


@pytest.mark.parametrize(("gigabytes", "expected"), [(200, 64), (16, 5), (1, 1)])
def test_as_many_ranks_at_once_as_memory_allows(monkeypatch, gigabytes, expected):
    monkeypatch.setattr(plans, "host_memory", lambda: HostMemory(200 * 10**9, gigabytes * 10**9))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(plans, "_fields", lambda plan, execute, cores: {"at once": cores})
    (found,) = plans._made(uncached("toy"), len, len)  # type: ignore[arg-type]
    assert found == {"at once": expected}
