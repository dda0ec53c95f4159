"""Several runs in one process, as `torchrun train.py -m` and `srun python train.py -m` carry them out."""

import json

import pytest

from tests.daily import cases
from tests.programs import TORCHRUN, call

pytestmark = pytest.mark.ranks

SWEEP = (
    *TORCHRUN, "-m", "model=custom", "model._target_=tests.launch.departed.Departed", "data=synthetic_vectors",
    "data.inputs=8", "data.outputs=4", "train.steps=4", "device=cpu", "activations=recompute", "hydra.sweep.dir=sweep",
)  # fmt: skip


@cases(
    "overrides",
    [("parallel=ddp,fsdp,pdp",), ("parallel=ddp,fsdp", "compile=layers")],
    daily=[("parallel=ddp,fsdp,pdp",)],
    ids=str,
)
def test_the_model_of_a_run_is_gone_before_the_next_one_has_weights(tmp_path, environ, overrides):
    """The model looks itself: activation checkpointing and the compiler let it refer to itself."""
    done = call(*SWEEP, *overrides, cwd=tmp_path, environ=environ, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    results = (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["status"] for line in results} == {"ok"}
