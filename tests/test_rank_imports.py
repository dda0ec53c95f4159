"""What a rank of ``python train.py`` imports by itself, and what the fork server has imported for it."""

import json

import pytest

from tests.conftest import ROOT
from tests.programs import TRAIN, call
from tests.test_search_path import hide_modules

#: Python reads this when it starts, so also in the fork server: each of its forks says what it began and ended with.
SITE = """
import json, os, sys

def note_forks():
    global before
    before = sorted(sys.modules)

def leave(status, leave=os._exit):
    if "RANK" in os.environ and "before" in globals():
        with open(os.path.join(os.environ["MODULES"], str(os.getpid())), "w") as file:
            json.dump([before, sorted(sys.modules.keys() - set(before))], file)
    leave(status)

os.register_at_fork(after_in_child=note_forks)
os._exit = leave
"""


#: What takes time to import; Python's own modules differ from one version to the next.
HEAVY = ("torch", "tensorboard", "google", "hydra", "omegaconf", "antlr4", "numpy", "ptdbench", "mine")


@pytest.mark.ranks
def test_a_rank_imports_nothing_but_a_strangers_model(tmp_path, environ):
    """And none of the files beside the command that are named like modules."""
    (tmp_path / "site").mkdir()
    (tmp_path / "modules").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    hide_modules(tmp_path)
    (tmp_path / "mine.py").write_text("from ptdbench.models.toy import Toy\n\nclass Mine(Toy):\n    pass\n")
    asked = ("-m", "model=toy", "model._target_=mine.Mine", "parallel=ddp,fsdp,pdp", "device=cpu", "train.steps=2")
    environ = {**environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "MODULES": f"{tmp_path}/modules"}
    done = call(*TRAIN, *asked, "hydra.sweep.dir=sweep", cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(path.read_text()) for path in (tmp_path / "modules").iterdir()]
    assert len(ranks) == 6
    for before, imported in ranks:
        assert "mine" not in before
        heavy = [name for name in imported if name.partition(".")[0] in HEAVY]
        assert heavy == ["mine", "ptdbench.models.toy"]  # which it imports, and the command line does not name
