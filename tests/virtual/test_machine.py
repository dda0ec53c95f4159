"""What the library is built of and for, and what is said where it cannot be."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from ptdbench.problems import ConfigError
from ptdbench.virtual import machine
from ptdbench.virtual.machine import Machine, symbols, texts
from tests.refusals import refusal_of
from tests.virtual.conftest import DEVICE, Start

CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="left out: torch is no build for CUDA")


@pytest.mark.parametrize(
    ("version", "hip", "kind"), [("2.14.1+cpu", None, "the CPU"), ("2.14.1+rocm7.0", "'7.0.2'", "ROCm")]
)
def test_other_builds_of_torch_are_refused(monkeypatch, tmp_path, version, hip, kind):
    text = f"__version__ = '{version}'\ncuda: Optional[str] = None\nhip: Optional[str] = {hip}\n"
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    text = f"torch={version}: a virtual GPU runs torch's build for CUDA, and this one is for {kind}"
    assert refusal_of(machine.build) == text


def test_missing_torch_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert refusal_of(machine.build) == "torch=null: no torch is installed for this Python"


@pytest.mark.parametrize(("system", "processor"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_other_platforms_are_refused(monkeypatch, system, processor):
    monkeypatch.setattr(machine.sys, "platform", system)
    monkeypatch.setattr(machine.platform, "machine", lambda: processor)
    assert refusal_of(machine.build).endswith(": a virtual GPU needs Linux on x86-64 or aarch64")


@CUDA
@pytest.mark.usefixtures("cache")
def test_compile_error_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'warning: w' >&2\necho 'memory.c:7: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"cannot be compiled: memory.c:7: error: no such thing$"):
        machine.build()


def test_unwritable_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(machine, "_key", lambda torch: "key")
    monkeypatch.setattr(machine, "_installed", lambda: None)
    with pytest.raises(ConfigError, match=rf"virtual={tmp_path}/file/.*cannot be kept there"):
        machine.build()


def test_library_defines_every_call_of_torch(start: Start):
    folder = machine.build()
    assert machine.build() == folder
    assert machine.wanted(machine._installed()) <= symbols(folder / "libptdbench_virtual.so", "defined")
    stubs = (folder / "stubs.c").read_text()
    assert 'cublasDtrsm_v2(void) { return unanswered("cublasDtrsm_v2", 15); }' in stubs
    assert 'cudaGraphNodeGetDependencies(void) { return unanswered("cudaGraphNodeGetDependencies", 801); }' in stubs
    assert not re.search(r"\b(cudaMalloc|ncclAllReduce|cudnnGetVersion)\(", stubs)


def test_calls_in_macros_are_wanted(tmp_path):
    source = tmp_path / "driver.c"
    source.write_text('define(get, cuLaunchKernelEx);\ncuInit(0); dlsym(lib, "cuGraphLaunch"); CUresult mycuInit2;')
    made = SimpleNamespace(libraries=[], looks_up=[], sources=[source])
    assert machine.wanted(made) == {"cuLaunchKernelEx", "cuInit", "cuGraphLaunch"}  # type: ignore[arg-type]


def test_environment_preloads_the_library_first(start: Start, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    folder = machine.build()
    variables = Machine(DEVICE, ranks=[0]).environment(3)
    assert variables["LD_PRELOAD"] == f"{folder}/libptdbench_virtual.so:libother.so"
    assert variables["LD_LIBRARY_PATH"] == f"{folder}:/somewhere"
    texts = {name.removeprefix("PTDBENCH_VIRTUAL_"): value for name, value in variables.items()}
    assert (texts["COUNT"], texts["ALONE"]) == ("3", "1")
    assert texts["COMPUTED"].split(",") == ["fill", "cast", "strided", "compare", "add", "sum", "all", "max", "nonzero"]


def test_program_without_gpu_runs_unchanged(start: Start):
    environ = {**Machine(DEVICE).environment(1), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", "echo all right"], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("all right\n", "")


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
    assert "wanted" in symbols(library, "undefined")
    assert "given" in symbols(library, "defined")
    assert not {"given", "hidden"} & symbols(library, "undefined")
    assert not {"wanted", "hidden"} & symbols(library, "defined")
    assert texts(library, r"cu[A-Z]\w+") == {"cuLookedUp"}


def test_other_file_is_an_error(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(subprocess.CalledProcessError):
        symbols(tmp_path / "text", "defined")


def test_missing_binutils_are_named(library, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"^PATH=: has no nm, and a virtual GPU needs binutils; install them$"):
        symbols(library, "defined")
