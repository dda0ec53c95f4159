"""What the library is built of and for, and what is said where it cannot be."""

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

from ptdbench.problems import ConfigError
from ptdbench.virtual import elf, library
from tests.refusals import refusal_of
from tests.virtual.conftest import DEVICE, Start

CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="left out: torch is no build for CUDA")


@pytest.mark.parametrize(
    ("version", "hip", "kind"), [("2.14.1+cpu", None, "the CPU"), ("2.14.1+rocm7.0", "'7.0.2'", "ROCm")]
)
def test_other_builds_of_torch_are_refused(monkeypatch, tmp_path, version, hip, kind):
    text = f"__version__ = '{version}'\ncuda: Optional[str] = None\nhip: Optional[str] = {hip}\n"
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(library, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    text = f"torch={version}: a virtual GPU runs torch's build for CUDA, and this one is for {kind}"
    assert refusal_of(library.build) == text


def test_missing_torch_is_refused(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    assert refusal_of(library.build) == "torch=null: no torch is installed for this Python"


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_other_platforms_are_refused(monkeypatch, system, machine):
    monkeypatch.setattr(library.sys, "platform", system)
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    assert refusal_of(library.build).endswith(": a virtual GPU needs Linux on x86-64 or aarch64")


@CUDA
@pytest.mark.usefixtures("cache")
def test_compile_error_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'warning: w' >&2\necho 'memory.c:7: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"cannot be compiled: memory.c:7: error: no such thing$"):
        library.build()


def test_unwritable_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(library, "_key", lambda torch: "key")
    monkeypatch.setattr(library, "_installed", lambda: None)
    with pytest.raises(ConfigError, match=rf"virtual={tmp_path}/file/.*cannot be kept there"):
        library.build()


def test_library_defines_every_call_of_torch(start: Start):
    installed = library._installed()
    folder = library.build()
    assert library.build() == folder
    assert library.wanted(installed) <= elf.defined(folder / "libptdbench_virtual.so")
    stubs = (folder / "stubs.c").read_text()
    assert 'cublasDtrsm_v2(void) { return unanswered("cublasDtrsm_v2", 15); }' in stubs
    assert 'cudaGraphNodeGetDependencies(void) { return unanswered("cudaGraphNodeGetDependencies", 801); }' in stubs
    assert not re.search(r"\b(cudaMalloc|ncclAllReduce|cudnnGetVersion)\(", stubs)


def test_calls_in_macros_are_wanted(tmp_path):
    source = tmp_path / "driver.c"
    source.write_text('define(get, cuLaunchKernelEx);\ncuInit(0); dlsym(lib, "cuGraphLaunch"); CUresult mycuInit2;')
    made = SimpleNamespace(libraries=[], looks_up=[], sources=[source])
    assert library.wanted(made) == {"cuLaunchKernelEx", "cuInit", "cuGraphLaunch"}  # type: ignore[arg-type]


def test_environment_preloads_the_library_first(start: Start, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    folder = library.build()
    variables = library.environment(DEVICE, 3, alone=True)
    assert variables["LD_PRELOAD"] == f"{folder}/libptdbench_virtual.so:libother.so"
    assert variables["LD_LIBRARY_PATH"] == f"{folder}:/somewhere"
    texts = {name.removeprefix("PTDBENCH_VIRTUAL_"): value for name, value in variables.items()}
    assert (texts["COUNT"], texts["ALONE"]) == ("3", "1")
    assert texts["COMPUTED"].split(",") == ["fill", "cast", "strided", "compare", "add", "sum", "all", "max", "nonzero"]


def test_program_without_gpu_runs_unchanged(start: Start):
    environ = {**library.environment(DEVICE, 1), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", "echo all right"], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("all right\n", "")
