"""Runs on virtual GPUs through the product's own launcher: what their records hold, and what they do not."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from ptdbench.prediction.log import OPERATIONS, read
from ptdbench.records.run_record import typed
from ptdbench.report import table
from tests.conftest import ROOT, records
from tests.programs import call
from tests.virtual.conftest import Start

pytestmark = pytest.mark.ranks

SMALL = (
    "model=gpt_tiny", "model.layers=2", "model.width=64", "model.heads=2", "model.sequence_length=32",
    "data=synthetic_tokens", "train.global_batch=8", "train.steps=2", "train.warmup_steps=0", "profile.steps=1",
)  # fmt: skip


def train(environ: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call(sys.executable, ROOT / "train.py", *words, cwd=folder, environ=environ)


@pytest.fixture(scope="module")
def swept(start: Start, environ: dict[str, str], shared: Path, tmp_path_factory) -> Path:
    """A sweep of layouts on GPUs of two models, in one start; the folder with its outputs."""
    folder = shared / "swept"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            sweeping = tmp_path_factory.mktemp("sweeping")
            words = ("parallel=ddp,fsdp,tp", "virtual=h200,v100", "offload=none,optimizer_and_weights")
            done = train(environ, sweeping, "-m", *SMALL, *words, "precision=bf16")
            assert done.returncode == 1  # as some are refused
            sweeping.rename(folder)
    return folder


def test_every_layout_runs_where_the_gpu_has_its_format(swept):
    """Only on a GPU materializing a model moved offloaded shards back, and products in fp32 had no divided weights."""
    done = set()
    for record in records(swept):
        offload = record["config"]["offload"]
        if record["config"]["virtual"]["name"] == "v100":
            assert "precision=bf16: virtual Tesla V100-SXM2-32GB" in record["error"]["message"]
        elif record["parallel"] != "fsdp" and offload != "none":
            assert record["error"]["message"].startswith("offload=optimizer_and_weights: needs sharded weights")
        else:
            assert (record["status"], record["kind"]) == ("ok", "virtual"), record["error"]
            assert record["virtual"]["device"] == "virtual NVIDIA H200"
            done.add((record["parallel"], offload))
    assert done == {("ddp", "none"), ("tp", "none"), ("fsdp", "none"), ("fsdp", "optimizer_and_weights")}


def test_virtual_run_has_memory_and_messages_but_no_times(swept):
    for record in records(swept):
        if record["status"] != "ok":
            continue
        virtual, metrics = record["virtual"], record["metrics"]
        assert virtual["ranks"] == [0, 1]
        assert virtual["reason"] is None
        assert metrics["peak_memory_bytes"] == max(virtual["allocated_bytes"])
        assert metrics["peak_reserved_bytes"] == max(virtual["reserved_bytes"])
        pairs = zip(virtual["allocated_bytes"], virtual["reserved_bytes"], strict=True)
        assert all(allocated <= reserved for allocated, reserved in pairs)
        parts = zip(*record["memory"]["ranks"].values(), strict=True)
        assert [sum(kinds) for kinds in parts] <= virtual["allocated_bytes"]
        assert min(virtual["kernels"]["product"]) > 0
        assert min(virtual["kernels"]["communication"]) > 0
        rates = [name for name in metrics if "second" in name and "first" not in name and "startup" not in name]
        assert [metrics[name] for name in (*rates, "mfu", "share_of_ceiling")] == [None] * (len(rates) + 2)
        assert (record["final_loss"], record["phases"], record["hardware"]) == (None, None, None)
        assert all(sent["bytes"] > 0 for sent in virtual["messages"].values())


def test_messages_are_those_of_a_step_after_ddp_has_rebuilt_its_buckets(swept):
    """Which it does in the third step, of which these runs have but two, and broadcasts what is in them."""
    (sent,) = [run["virtual"]["messages"] for run in records(swept) if run["parallel"] == "ddp" and run["virtual"]]
    assert {*sent} == {"all_reduce"}


def test_sent_buckets_are_freed_between_steps(swept):
    """DDP makes new buckets in its second step; NCCL's watchdog held the old ones, as it looks ten times a second."""
    whole, sharded = (
        next(run["memory"]["ranks"] for run in records(swept) if run["parallel"] == name and run["memory"])
        for name in ("ddp", "fsdp")
    )
    assert max(whole["other"]) - max(sharded["other"]) < min(whole["gradients"])  # both have cuBLAS's workspaces


def test_table_does_not_rank_virtual_runs(swept):
    runs = records(swept)
    shown = table.render([*map(typed, runs)], 160)
    rows = [line for line in shown.splitlines() if "virtual ok" in line]
    assert len(rows) == 4
    assert all(row.startswith("-") for row in rows)
    assert "tokens/s" not in shown
    assert "nothing is computed" in shown


@pytest.mark.parametrize("words", [
    pytest.param((*SMALL, "model.layers=4", "parallel=3d", "parallel.tensor=2"), id="stages and tensor"),
    pytest.param(
        (*SMALL, "model.layers=4", "parallel=pdp", "parallel.schedule=interleaved1f1b", "precision=bf16"),
        id="several stages", marks=pytest.mark.thorough,
    ),
    pytest.param(
        ("model=hf_llama_tiny", *SMALL[5:], "parallel=pdp", "parallel.schedule=interleaved1f1b", "precision=bf16"),
        id="masks that ask for values", marks=pytest.mark.thorough,
    ),
])  # fmt: skip
def test_present_ranks_alone_take_what_they_take_among_all(start: Start, environ, tmp_path, words):
    """Two of four ranks of a pipeline of two: bytes and calls as with the other two.

    Stages send and receive together, as tied weights are: NCCL's kernel says of neither what it was.
    """
    setting = ("parallel.pipeline=2", "cluster.ranks_per_node=4", "virtual=h100")
    logs = tmp_path / "logs"  # the last run's stay
    logged = {**environ, "PTDBENCH_VIRTUAL_LOG": str(logs)}
    done = train(logged, tmp_path, "-m", *words, *setting, "virtual.ranks=[0,3],null")
    assert done.returncode == 0, done.stderr
    some, every = (record["virtual"] for record in records(tmp_path))
    assert some["ranks"] == [0, 3]
    assert {*every["messages"]} >= {"send", "recv", "all_reduce"}
    assert all(sent["bytes"] > 0 for sent in every["messages"].values())
    # Before torch 2.14 the first step of a module without parts() infers shapes, for which the parts before a lone
    # stage run beside its weights.
    most = 5e-3 if "model=hf_llama_tiny" in words and torch.__version__ < "2.14" else 0
    for name in ("allocated_bytes", "reserved_bytes", "communicators"):
        assert some[name] == pytest.approx([every[name][0], every[name][3]], rel=most, abs=0)
    assert "Warning" not in done.stderr
    assert "nothing answers" not in done.stderr
    assert_messages_join([next(log.steps()) for log in read(logs)])
    for kind, counts in some["kernels"].items():
        assert counts == [every["kernels"][kind][0], every["kernels"][kind][3]]


@pytest.mark.thorough
def test_fp8_gathers_half_the_bytes(start: Start, environ, tmp_path):
    """And ranks send the scales of a step in one message."""
    words = ("model.width=512", "parallel=fsdp", "precision=bf16,fp8_tensorwise", "virtual=h100")
    done = train(environ, tmp_path, "-m", *SMALL, *words, "cluster.ranks_per_node=2")
    assert done.returncode == 0, done.stderr
    sent = {record["precision"]: record["virtual"]["messages"] for record in records(tmp_path)}
    wide, narrow = sent["bf16"], sent["fp8_tensorwise"]
    assert narrow["all_gather"]["calls"] == wide["all_gather"]["calls"]
    weights = 12 * 512**2  # of a block; the second and last is gathered once
    assert wide["all_gather"]["bytes"] - narrow["all_gather"]["bytes"] == (2 + 1) * weights
    assert "all_reduce" not in wide
    assert (narrow["all_reduce"]["calls"], narrow["all_reduce"]["bytes"]) == (1, 4 * 4 * 2)


def assert_messages_join(steps: list[np.ndarray]) -> None:
    """Each collective has all of its members, and each send the receive that answers it."""
    collectives, transfers = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for step in steps:
        for entry in step[step["kind"] == b"N"]:
            collectives[entry["object"], entry["sequence"], entry["bytes"], entry["dims"][0]] += not entry["dims"][3]
        for entry in step[step["kind"] == b"T"]:
            sends = OPERATIONS[entry["operation"]] == "send"
            _, mine, peer = entry["dims"][:3]
            ends = (mine, peer) if sends else (peer, mine)
            transfers[(entry["object"], *ends, entry["sequence"], entry["bytes"])] += 1 if sends else -1
    assert len(transfers) > 4
    assert not any(transfers.values())
    assert {ranks for *_, ranks in collectives} >= {2}
    assert all(members in (0, ranks) for (*_, ranks), members in collectives.items())


OWN_GPU = """
from dataclasses import dataclass

import torch

from ptdbench.workloads.train import Train


@dataclass(frozen=True)
class Watched(Train):
    def __call__(self, job):
        outcome = super().__call__(job)
        used = [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]
        assert used == [job.device.index], used
        return outcome
"""


@pytest.mark.thorough
def test_ranks_have_a_context_only_on_their_gpu(start: Start, environ, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_GPU)
    (tmp_path / "conf/workload").mkdir(parents=True)
    (tmp_path / "conf/workload/watched.yaml").write_text("name: watched\nlabel: watched\n_target_: mine.Watched\n")
    levers = ("activations=offload", "checkpoint.every_steps=2", "eval.every=2", "data=text", "data.held_out=0.1")
    words = ("--config-dir=conf", "workload=watched", "parallel=ddp,fsdp,pdp", "virtual=h100", "precision=bf16")
    done = train(environ, tmp_path, "-m", *SMALL, *words, *levers, "profile=true")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_sanitizer_finds_no_races(start: Start, environ, tmp_path):
    """With its variable torch uses CUDA on import: neither what starts ranks nor their server may have it."""
    words = ("-m", *SMALL, "parallel=ddp,fsdp", "virtual=h100", "train.clip_norm=1")
    done = train({**environ, "TORCH_CUDA_SANITIZER": "1"}, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    for record in records(tmp_path):
        assert record["environment"]["settings"]["TORCH_CUDA_SANITIZER"] == "1"


@pytest.mark.thorough
def test_synchronized_batch_norm_runs_on_virtual_gpus(start: Start, environ, tmp_path):
    """torch looks for ranks without samples by a mask, which a virtual GPU does not compute."""
    words = ("model=resnet18", "model.image_size=32", "parallel=ddp", "parallel.sync_batchnorm=true", "virtual=h100")
    done = train(environ, tmp_path, *words, "train.global_batch=4", "train.steps=2", "train.warmup_steps=0")
    assert done.returncode == 0, done.stderr
    assert "virtual ok" in done.stdout


def test_missing_compiler_is_named(start: Start, environ, tmp_path):
    (tmp_path / "bin").mkdir()
    alone = {**environ, "PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = train(alone, tmp_path, *SMALL, "virtual=h100")
    assert done.returncode == 1
    error = f"PATH={tmp_path / 'bin'}: has no cc, and a virtual GPU needs a C compiler; install gcc or clang"
    assert done.stderr.strip().splitlines() == [error]
    assert not (tmp_path / "outputs").exists()
    left = [path.suffix for path in (tmp_path / "cache/ptdbench/virtual").iterdir()]
    assert left == [".lock"], "nothing half built is left"
