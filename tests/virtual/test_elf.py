import shutil
import subprocess

import pytest

from ptdbench.problems import ConfigError
from ptdbench.virtual import elf

SOURCE = """
extern int wanted(void);
const char *name = "cuLookedUp";
const char *longer = "not cuLookedUp at all";
int given(void) { return wanted(); }
static int hidden(void) { return 1; }
int (*kept)(void) = hidden;
"""


@pytest.fixture
def library(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("left out: no C compiler")
    (tmp_path / "a.c").write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "a.so", tmp_path / "a.c"], check=True)
    return tmp_path / "a.so"


def test_symbols_are_defined_or_undefined_and_whole_strings_names(library):
    assert "wanted" in elf.undefined(library)
    assert "given" in elf.defined(library)
    assert not {"given", "hidden"} & elf.undefined(library)
    assert not {"wanted", "hidden"} & elf.defined(library)
    assert elf.texts(library, r"cu[A-Z]\w+") == {"cuLookedUp"}


def test_other_file_is_an_error(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(subprocess.CalledProcessError):
        elf.defined(tmp_path / "text")


def test_missing_binutils_are_named(library, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"^PATH=: has no nm, and a virtual GPU needs binutils; install them$"):
        elf.defined(library)
