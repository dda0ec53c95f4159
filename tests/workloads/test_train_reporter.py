"""What a run reports of its steps: on every line figures that the table has, too."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ptdbench
from ptdbench.launch.world import World
from ptdbench.report.display import Display, Heading
from ptdbench.units import three_digits
from ptdbench.workloads import train
from tests import forked


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_reports_when_it_is_time_and_leaves_the_last_step_to_the_record(rank, monkeypatch):
    wall, err = SimpleNamespace(now=0.0), io.StringIO()
    monkeypatch.setenv("COLUMNS", "80")  # which is not enough for the rate of each rank
    monkeypatch.setattr(train.time, "perf_counter", lambda: wall.now)
    display = Display(Heading("toy pdp") if rank == 0 else None, stream=err, clock=lambda: wall.now)
    training = SimpleNamespace(data=SimpleNamespace(tokens_per_sample=None), layout=SimpleNamespace(global_batch=4))
    spec = SimpleNamespace(config=SimpleNamespace(general=SimpleNamespace(compile=False)), virtual=None)
    world = World(rank, 2, rank, 2, "local")
    device = torch.device("cpu")
    job: Any = SimpleNamespace(
        spec=spec, training=training, world=world, device=device, directory=None, display=display
    )
    loop: Any = SimpleNamespace(done=0)
    report = train.reporter(job, loop, 100)
    display.loss = 1, 2.5
    for loop.done, wall.now, steps in ((1, 0.0, 100), (2, 60.0, 100), (3, 60.1, 3)):
        report(steps)
    display.conclude(8.0)
    lines = [
        "toy pdp  step 2/100  0.0667 samples/s  loss 2.5000 (step 1)  1:38:00 left",
        "toy pdp  step 3/3  8.00 samples/s  loss 2.5000 (step 1)  0:00 left",
    ]
    assert err.getvalue().splitlines() == ([] if rank else lines)


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", ["ddp", "pdp"])
def test_the_last_line_has_the_throughput_and_the_loss_of_the_record(parallel, tmp_path):
    """The loss of one replica, or of a stage on another rank, and the pace of the warm-up would be other figures."""
    typed = ("model=toy", f"parallel={parallel}", "train.steps=5", "profile.steps=0", "device=cpu", "hydra.run.dir=run")
    done = forked.with_ranks(*typed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = ptdbench.load(tmp_path / "run")
    per_second, loss = run["metrics"]["samples_per_second"], run["final_loss"]
    rate = f"{three_digits(per_second)} samples/s  ({three_digits(per_second / 2)} a rank)"
    (line,) = [line for line in done.stderr.splitlines() if "  step 5/5" in line]
    assert line == f"toy {parallel}  step 5/5  {rate}  loss {loss:.4f}  0:00 left"
