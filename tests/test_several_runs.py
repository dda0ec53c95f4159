"""Several runs in one process, as `torchrun train.py -m` and `srun python train.py -m` carry them out."""

import json

import pytest

from tests.programs import TORCHRUN, call

pytestmark = pytest.mark.ranks

SWEEP = (
    *TORCHRUN, "-m", "model=custom", "model._target_=tests.launch.departed.Departed", "data=synthetic_vectors",
    "data.inputs=8", "data.outputs=4", "train.steps=4", "device=cpu", "activations=recompute", "hydra.sweep.dir=sweep",
)  # fmt: skip


@pytest.mark.thorough
def test_the_compiled_model_of_a_run_is_gone_before_the_next_one_has_weights(tmp_path, environ):
    """The model looks itself: activation checkpointing and the compiler let it refer to itself.

    One that is not compiled does so in tests/test_from_python.py.
    """
    done = call(*SWEEP, "parallel=ddp,fsdp", "compile=layers", cwd=tmp_path, environ=environ, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    results = (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["status"] for line in results} == {"ok"}
