"""``ptdbench virtual``: programs that know nothing of ptdbench, and what is said of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ptdbench.planning import step_time
from ptdbench.prediction.log import read
from ptdbench.setup import choices
from tests.programs import TORCHRUN, call
from tests.virtual.conftest import shared, start  # noqa: F401 # fixtures

pytestmark = pytest.mark.usefixtures("start")

MIB = 1 << 20
WIDTH, LAYERS = 512, 4

PROGRAM = f"""
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn

if "RANK" in os.environ:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
model = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})]).cuda()
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
for step in range(int(sys.argv[2])):
    model(torch.ones(32, {WIDTH}, device="cuda")).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print("step", step, torch.cuda.max_memory_allocated(), flush=True)
    torch.cuda.reset_peak_memory_stats()
if "RANK" in os.environ:
    dist.destroy_process_group()
"""


@pytest.fixture(name="virtual")
def _virtual(environ: dict[str, str], tmp_path: Path) -> Any:
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "ptdbench", "virtual", *map(str, words))
        return call(*command, cwd=tmp_path, environ={**environ, **variables})

    return run


def test_each_rank_of_a_launcher_has_its_account(virtual, environ, tmp_path):
    """Ended after four of many steps, as DDP makes new buckets in the second; a step is one of the first optimizer."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    words = ("h100x2", "--json", "--steps", 4, "--", *launcher, "program.py", 100, 100_000)
    done = virtual(*words, PTDBENCH_VIRTUAL_LOG=str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    found = record["virtual"]
    assert (record["status"], record["steps"], found["ranks"]) == ("ok", 4, [0, 1])
    assert found["allocated_bytes"] == [100 * MIB] * 2
    assert found["peak_steps"] == [1, 1]
    assert found["outside_bytes"] == [520 * MIB] * 2
    weights = LAYERS * WIDTH**2
    assert found["messages"] == {"all_reduce": {"calls": 2, "bytes": 4 * weights}}
    # The first layer has no gradient of its inputs.
    assert found["flops"] == [2 * 32 * (2 * weights + (LAYERS - 1) * WIDTH**2)] * 2
    assert found["kernels"]["product"] == [3 * LAYERS - 1] * 2
    # DDP puts all gradients into one bucket at first.
    first = found["first_step"]
    assert first["messages"]["all_reduce"] == {"calls": 1, "bytes": 4 * weights}
    assert (first["allocated_bytes"], first["flops"]) == ([100 * MIB] * 2, found["flops"])
    shown = call(sys.executable, "-m", "ptdbench", "explain", record["directory"], cwd=tmp_path, environ=environ)
    assert "520 MiB" in shown.stdout
    step = record["predicted"]
    assert (step["reason"], step["bound_by"]) == (None, "host")
    assert step["high"] == pytest.approx(1.25 * sum(step["parts"].values()))
    assert "saved of the step if twice as fast: host" in shown.stdout
    for rank, log in enumerate(read(tmp_path / "logs")):  # of the steps after the second
        assert log.facts["rank"] == rank
        names = [log.names[name] for name in next(log.steps())["name"]]
        assert sum("gemm" in name for name in names) == 3 * LAYERS - 1


def test_run_of_ours_needs_and_takes_the_same_under_a_launcher(virtual, environ, tmp_path):
    """Its steps have so many samples that what its loop does between them counts little."""
    words = ("model=gpt_tiny", "parallel=ddp", "train.steps=4", "train.global_batch=2048", "profile.steps=0")
    own = ("virtual=h100", "cluster.ranks_per_node=2", "hydra.run.dir=run")
    logged = {**environ, "PTDBENCH_VIRTUAL_LOG": str(tmp_path / "logs")}
    assert call(*TORCHRUN[:1], TORCHRUN[-1], *words, *own, cwd=tmp_path, environ=logged).returncode == 0
    done = virtual("h100x2", "--json", "--", *TORCHRUN, *words, "device=cuda")
    assert done.returncode == 0, done.stderr
    expected = json.loads((tmp_path / "run" / "record.json").read_text())["virtual"]
    record = json.loads(done.stdout)
    found, step = record["virtual"], step_time.predicted(read(tmp_path / "logs"), choices.gpu("h100"))
    assert record["predicted"]["step_seconds"] == pytest.approx(step.step_seconds, rel=0.01)
    names = ("allocated_bytes", "reserved_bytes")  # rank 0, which checks the run, has its allocator's options too
    # The peak of four steps varies by 512 bytes from run to run, with a log and without.
    assert [found[name] for name in names] == [pytest.approx(expected[name], rel=1e-6) for name in names]


def test_out_of_memory_names_the_way_to_learn_the_need(virtual):
    words = ("--", sys.executable, "program.py", 3000, 3)  # which ends while its steps are logged
    short = virtual("h100", "--memory", "3GiB", *words)
    assert short.returncode == 1
    assert "GPU 0 has a total capacity of 3.00 GiB" in short.stderr
    assert f"out of memory on an allocation of {3000 * MIB:,} bytes" in " ".join(short.stderr.split())
    assert "--memory 1TiB" in short.stderr
    ample = virtual("h100", "--memory", "1TiB", *words)
    assert ample.returncode == 0, ample.stderr
    assert "2.93 GiB" in ample.stdout
    assert "no predicted time: it took 3, and 4 are needed, 2 of them to warm up" in ample.stdout


PROFILED = """
import torch
from torch.profiler import profile, schedule

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters())
with profile(schedule=schedule(wait=2, warmup=1, active=1, repeat=1)) as profiler:
    for _ in range(5):
        model(torch.ones(8, 512, device="cuda")).sum().backward()
        optimizer.step()
        profiler.step()
print(sum(event.key.startswith("aten::mm") for event in profiler.key_averages()), "product")
"""


def test_profiler_of_the_program_goes_first(virtual, tmp_path):
    (tmp_path / "profiled.py").write_text(PROFILED)
    done = virtual("h100", "--", sys.executable, "profiled.py")
    assert done.stdout.startswith("1 product\n"), done.stderr
    assert "no predicted time: its steps cannot be logged: its own profiler runs meanwhile" in done.stdout


@pytest.mark.parametrize("gpu", ["rtx_4090", "b300"])
def test_gpus_that_torch_is_not_compiled_for_sort(virtual, gpu):
    """With CUB, which has code for 8.6 and 10.0, not for 8.9 and 10.3."""
    done = virtual(gpu, "--", sys.executable, "-c", "import torch; torch.rand(9999, device='cuda').sort(stable=True)")
    assert done.returncode == 0, done.stderr


def test_crash_of_the_library_says_so(virtual):
    program = "import ctypes, torch; torch.ones(3, device='cuda'); ctypes.CDLL(None).cudaMemGetInfo(8, 8)"
    done = virtual("h100", "--", sys.executable, "-c", program)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "ptdbench's library crashed in cudaMemGetInfo (Segmentation fault): a fault of ptdbench" in done.stderr
    assert "no process used a GPU" not in done.stdout + done.stderr


SOME_RANKS = """
import os
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, dist.get_rank())
first = [dist.get_rank() + 10]
dist.broadcast_object_list(first, src=0)
dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
dist.all_reduce(torch.ones(1000, device="cuda"))
dist.barrier()
print(f"{ranks} {first} {os.environ['LOCAL_RANK']} {os.environ['GROUP_RANK']}|")
"""


def test_some_ranks_run_without_the_others(virtual, tmp_path):
    (tmp_path / "some.py").write_text(SOME_RANKS)
    done = virtual("h100x2", "--nodes", 3, "--ranks", "1,4", "--json", "--", sys.executable, "some.py")
    assert done.returncode == 0, done.stderr
    assert "[1, 1, 1, 1, 4, 4] [11] 1 0|" in done.stderr
    assert "[1, 1, 1, 1, 4, 4] [11] 0 2|" in done.stderr
    record = json.loads(done.stdout)
    assert (record["world_size"], record["virtual"]["ranks"]) == (6, [1, 4])
    assert record["virtual"]["messages"]["all_reduce"]["bytes"] >= 4000


def test_interrupt_leaves_nothing(environ, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("-m", "ptdbench", "virtual", "h100", "--", sys.executable, "program.py", "1", "1000000")
    started = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout
    while "step" not in started.stdout.readline():
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGINT)
    started.communicate(timeout=60)
    assert started.returncode in (1, 130)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "program.py 1 1000000" not in listed


@pytest.mark.parametrize(("words", "message"), [
    (("h1000", "--", "ls"), "GPU=h1000: no such GPU; try h100"),
    (("h100x121", "--", "ls"), "GPU=h100x121: torch is compiled for 1 to 120 GPUs of a node"),
    (("h100",), "COMMAND=(none): there is no program; try h100 -- python train.py"),
    (("h100", "--memory", "20", "--", "ls"), "--memory=20: must be a size; try 20GiB"),
    (("h100", "--steps", "0", "--", "ls"), "--steps=0: must be a whole number of at least 1"),
    (("h100x2", "--ranks", "0,2", "--", "ls"), "--ranks=0,2: must be different ranks from 0 to 1; try 0"),
    (("h100", "--nodes", "2", "--", "torchrun", "t.py"), "COMMAND=torchrun: --nodes and --ranks start each rank"),
    (("h100", "--ranks", "0", "--", "x", "-m", "torch.distributed.run"), "COMMAND=x: --nodes and --ranks start each"),
    (("h100", "--", "./missing"), "COMMAND=./missing: cannot be started: No such file or directory"),
])  # fmt: skip
def test_bad_input_is_refused_in_one_sentence(ptdbench, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    status, _, (line,) = ptdbench("virtual", *words)
    assert (status, line.startswith(message)) == (1, True), line


ENDLESS = """
import subprocess
import torch

asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
print(subprocess.check_output(asked, text=True), subprocess.check_output(["nvidia-smi", "-L"], text=True), flush=True)
wanted = torch.randn(1000, device="cuda").sum()
while wanted.item() < 1:
    wanted = torch.randn(1000, device="cuda").sum()
"""


def test_program_that_waits_for_a_value_ends_with_its_place(virtual, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    done = virtual("h100x2", "--", sys.executable, "endless.py")
    assert done.returncode == 1
    assert done.stdout.startswith(
        "virtual NVIDIA H100 80GB HBM3, 81080\nvirtual NVIDIA H100 80GB HBM3, 81080\n GPU 0: "
    )
    assert "this program never ends: it waits for a value of the GPU" in done.stderr
    assert 'endless.py", line 9, in <module>' in done.stderr or 'endless.py", line 8, in <module>' in done.stderr


CHECKPOINTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)).cuda()
inputs = torch.randn(8, 64, device="cuda", requires_grad=True)
checkpoint(layer, inputs, use_reentrant=False).sum().backward()
copied = torch.full((1,), 7.0).cuda()
print(inputs.grad.shape, copied.item(), flush=True)
place = copied.data_ptr()
del copied
fresh = torch.empty(1, device="cuda")
print(fresh.data_ptr() == place, fresh.item())
"""


def test_memory_is_followed_while_an_exception_passes_through_torch(virtual, tmp_path):
    """Recomputation stops early by an exception, on whose way torch releases tensors."""
    (tmp_path / "checkpointed.py").write_text(CHECKPOINTED)
    done = virtual("h100", "--", sys.executable, "checkpointed.py")
    assert done.stdout.startswith("torch.Size([8, 64]) 7.0\nTrue 0.0\n"), done.stderr


def test_program_without_gpu_keeps_its_status_and_output(virtual):
    done = virtual("h100", "--", "sh", "-c", "echo out; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert "no process used a GPU" in done.stderr


def test_gpus_are_listed(ptdbench):
    status, listed, _ = ptdbench("virtual")
    assert (status, "NVIDIA H100 80GB HBM3" in listed) == (0, True)
