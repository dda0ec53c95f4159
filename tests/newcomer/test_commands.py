"""Every command of the pages that two cores can carry, typed as it stands there, and what a user brings along."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import records
from tests.parallel.splitting import is_refused
from tests.programs import active
from tests.shown import PAGES, typed

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

#: What two cores, or a machine without the reader's own files, cannot carry.
LEFT_OUT = re.compile(
    r"<|/data/|my-branch|old/bin|data\.download|\.\.\.|node_rank|rdzv_endpoint|/home/ada|container\.image|"
    r"tensorboard|job\.sh|nope|ptdbench (status|report outputs/latest$)|my_train|finetune|torchtitan|benchmarks\."
)

#: Commands that would take long as they stand, and what is added to them.
SHORTENED = {
    r"^(?!.*ptdbench virtual).*model=gpt_small": "train.steps=2 train.global_batch=4 model.sequence_length=128",
    r"model=resnet50": "train.steps=2",
    r"experiment=(?!digits)": "train.steps=20",
    r"n_trials=20": "hydra.sweeper.n_trials=4",
    r"sampler\.seed=1 experiment": "train.steps=5 hydra.sweeper.n_trials=2",
    r"workload=(p2p|collectives|matmul)": "workload.seconds=0.01",
    r"train\.py (?!.*virtual).*ranks_per_node=8": "train.steps=10",
    r"model\.router\.balance=": "train.steps=10",
    r"same_nodes": "cluster.nodes=2 cluster.time_minutes=9 repeat=2",
    r"cluster\.nodes=1,2,4,8 .*activations=keep,": "cluster.nodes=1,8 activations=keep,recompute",
}

COMMANDS = sorted(
    {line for page in PAGES for line in typed(page.read_text()) if not (LEFT_OUT.search(line) or is_refused(line))}
)


def call(line: str, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, shell=True, cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False)


def of_wheel(line: str) -> str:
    """The command of a checkout, as it is where only the wheel is."""
    line = re.sub(r"^python train\.py", "ptdbench train", line)
    return re.sub(r"(?<!python) train\.py", " -m ptdbench train", line).replace(
        "python train.py", "python -m ptdbench train"
    )


def started_as_root(environ: Mapping[str, str]) -> dict[str, str]:
    """What Open MPI wants of root, and for more ranks than cores."""
    words = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    return {**environ, **dict.fromkeys(words, "1")}


@pytest.mark.parametrize("line", COMMANDS, ids=[str(number) for number in range(len(COMMANDS))])
def test_a_command_of_the_pages(line, programs, shell, slurm, mpirun, home):
    env = started_as_root(active(programs, slurm) if re.search("slurm|srun|sbatch", line) else shell)
    more = " ".join(words for pattern, words in SHORTENED.items() if re.search(pattern, line))
    done = call(f"{of_wheel(line)} {more}", home, env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert all(record["status"] == "ok" for record in records(home) if record.get("kind") != "planned")  # may not fit


def test_there_are_such_commands():
    assert {"python train.py", "python train.py workload=check", "mpirun -np 2 python train.py parallel=ddp"} <= set(
        COMMANDS
    )
    assert len(COMMANDS) > 35


def test_a_model_data_and_an_optimizer_of_ones_own(shell, home):
    mine = "ptdbench train -m --config-dir my_conf model=mine data=mine optimizer=mine parallel=ddp,fsdp,pdp"
    done = call(f"{mine} train.steps=40", home, shell)
    assert done.returncode == 0, done.stdout + done.stderr
    found = records(home)
    assert [(record["parallel"], record["model"], record["status"]) for record in found] == [
        (parallel, "mine", "ok") for parallel in ("ddp", "fsdp", "pdp")
    ]
    assert all(record["final_loss"] < 0.4 for record in found)  # of targets whose variance is about 0.5
