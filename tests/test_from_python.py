"""``ptdbench.train``: the command, called by a program, which goes on as before."""

import json
import sys
import threading
from pathlib import Path

import pytest

import ptdbench
from tests.programs import TORCHRUN, call

OPTIONS = ("model=toy", "train.steps=2", "device=cpu", "profile.steps=0")
SWEEP = (
    "data=synthetic_vectors", "data.inputs=8", "data.outputs=4", "train.steps=4", "device=cpu",
    "activations=recompute", "parallel=ddp,fsdp,pdp",
)  # fmt: skip

#: Without a guard of ``__main__``; in a job of Hydra, as that has a global state.
PROGRAM = f"""
import json, os, sys, hydra, ptdbench

def state():
    return os.getcwd(), [*sys.argv], [*sys.path], {{**os.environ}}

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    before = state()
    try:
        ptdbench.train(["model=toyy"])
    except ptdbench.TrainError as error:
        print("error", error)
    sweep = ptdbench.train(["model=custom", "model._target_=mine.Mine", *{SWEEP}])
    run = ptdbench.train({list(OPTIONS)})
    found = [[sweep.frame()[name].to_list() for name in ("status", "parallel", "model")], run["status"]]
    print(f"found {{json.dumps([*found, state() == before])}}\\n", end="")

main()
"""
MODEL = "from tests.launch.departed import Departed\nclass Mine(Departed): ...\n"


@pytest.mark.parametrize("launcher", [(sys.executable,), TORCHRUN[:-1]], ids=["itself", "torchrun"])
def test_program_that_trains_twice(launcher, tmp_path, environ):
    """The sweep's model sees whether its predecessor is gone from the process, which under torchrun is the same one."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mine.py").write_text(MODEL)
    done = call(*launcher, "program.py", cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    said = [line.partition(" ") for line in done.stdout.splitlines()]
    ranks = 2 if launcher[1:] else 1
    found = [json.loads(rest) for word, _, rest in said if word == "found"]
    assert found == ranks * [[[["ok"] * 3, ["ddp", "fsdp", "pdp"], ["Mine"] * 3], "ok", True]]
    errors = {rest for word, _, rest in said if word == "error"}
    first, others = "model=toyy: there is no such choice; try toy", "rank=1: another rank is refused, and says why"
    assert errors == ({first, others} if ranks == 2 else {first})
    assert "\r" not in done.stderr


def refusal(*words: str) -> str:
    with pytest.raises(ptdbench.TrainError) as refused:
        ptdbench.train(words)
    return str(refused.value)


def test_refusals(tmp_path, monkeypatch, environ, capsys):
    monkeypatch.chdir(tmp_path)
    within = "is defined in the program or the notebook itself, which ranks do not import"
    assert refusal(*OPTIONS, "model._target_=__main__.Mine") == (
        f"model._target_=__main__.Mine: {within}; move it to my_module.py, and try my_module.Mine"
    )
    assert "unrecognized arguments: --foo" in refusal("--foo")
    with pytest.raises(TypeError, match=r"try \['model=toy', '-m'\]"):
        ptdbench.train("model=toy -m")
    told = []
    thread = threading.Thread(target=lambda: told.extend([refusal(*OPTIONS), refusal("cluster=env")]))
    thread.start()
    thread.join()
    assert told[0] == "ptdbench.train must be called from the main thread, the only one that receives Ctrl-C"
    assert told[1].startswith("RANK=(not set): the launcher must have set it")
    assert [*Path.cwd().iterdir()] == []
    assert ptdbench.train(["--cfg", "job", "--package", "seed"]) == []
    assert capsys.readouterr().out == "0\n"


def test_process_group_of_the_caller_is_refused(alone):
    assert refusal(*OPTIONS).endswith(": call torch.distributed.destroy_process_group() first")
