import json
import sys

import pytest

from ptdbench.problems import ConfigError
from ptdbench.virtual import library
from ptdbench.virtual.selftest import CHECKS
from tests.conftest import ROOT
from tests.programs import call
from tests.virtual.conftest import DEVICE, Start


def test_disabled_or_crashing_kinds_fail_alone(start: Start, environ, monkeypatch):
    """With all of them switched off, as a new version of torch may do by other names or layouts."""
    environ = {**environ, **library.environment(DEVICE, 1), "PTDBENCH_VIRTUAL_COMPUTED": ""}
    done = call(sys.executable, "-m", "ptdbench.virtual.selftest", *CHECKS, cwd=ROOT, environ=environ)
    assert json.loads(done.stdout) == [], done.stderr
    # Each is tried by itself then.
    monkeypatch.setattr(library.selftest, "CHECKS", dict.fromkeys(("one", "two", "three")))
    monkeypatch.setattr(library, "_test", lambda kinds, variables: (None, "crash") if "two" in kinds else (kinds, ""))
    assert library._tested_kinds({}) == ["one", "three"]


def test_torch_that_does_not_start_is_quoted(monkeypatch):
    monkeypatch.setattr(library, "_test", lambda kinds, variables: (None, "ImportError: no"))
    with pytest.raises(ConfigError, match="torch does not start on the virtual GPU: ImportError: no"):
        library._tested_kinds({})
