import json
import subprocess
import sys

import pytest

from ptdbench.problems import ConfigError
from ptdbench.virtual import library
from ptdbench.virtual.selftest import CHECKS
from tests.conftest import ROOT
from tests.virtual.conftest import DEVICE, Start


def test_kernels_that_are_not_computed_are_found_to_be_wrong(start: Start, environ):
    """With all of them switched off, as a new version of torch may do by other names or layouts."""
    variables = {**library.environment(DEVICE, 1), "PTDBENCH_VIRTUAL_COMPUTED": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ptdbench.virtual.selftest", *CHECKS]
    done = subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_kind_that_ends_the_process_costs_only_itself(monkeypatch):
    """Each is tried by itself then."""
    monkeypatch.setattr(library.selftest, "CHECKS", dict.fromkeys(("one", "two", "three")))
    monkeypatch.setattr(library, "_try", lambda kinds, variables: (None, "crash") if "two" in kinds else (kinds, ""))
    assert library._right({}) == ["one", "three"]


def test_where_torch_does_not_start_at_all_its_last_words_are_told(monkeypatch):
    monkeypatch.setattr(library, "_try", lambda kinds, variables: (None, "ImportError: no"))
    with pytest.raises(ConfigError, match="torch does not start on the virtual GPU: ImportError: no"):
        library._right({})
