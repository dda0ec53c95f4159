"""Machines with virtual GPUs, as chosen by ``virtual=``, and the library that stands in for a GPU there.

torch's CUDA build calls the CUDA runtime, the driver, cuBLAS, cuDNN, NCCL, NVML and CUPTI through dynamic libraries.
The C sources beside this file implement those calls; the dynamic linker prefers them to NVIDIA's own (``LD_PRELOAD``),
so torch itself is unchanged. Memory, messages, the order of streams, and launched kernels are exact. Absent are

- time: to the host all work is done at once; between events pass 0.1 ms for each piece of work;
- values: kernels compute nothing, except for a few on few elements (``computed.c``), by layouts private to torch: each
  of these is tested once per version of torch and disabled if it fails (``computed.py``). Copies of more than 1 MiB,
  collectives of more than 64 KiB, and messages of more than 16 KiB arrive as zeros.

An unimplemented call is an error that names it. Stubs for this are generated for all names that the installed libraries
import, so a newer torch needs no list of ours.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from ptdbench import search_path
from ptdbench.files import user_cache, write_json
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.terminal import plural
from ptdbench.virtual import computed
from ptdbench.virtual.device import Device

#: The most GPUs of a node: torch's C10_COMPILE_TIME_MAX_GPUS.
MOST_GPUS = 120

#: The prefix of the names of virtual GPUs.
_VIRTUAL = "virtual "

_HERE = Path(__file__).parent

#: The library's file, and the names by which programs load parts of it.
_FILE, _LINKS = "libptdbench_virtual.so", ("libcuda.so.1", "libnvidia-ml.so.1")

#: NVIDIA headers that the sources include: a folder of each must be found.
_HEADERS = ("cuda.h", "cuda_runtime_api.h", "cublasLt.h", "cudnn.h", "nccl.h", "cupti.h")

#: Prefixes of calls to a GPU's libraries, and the status by which each library reports "not supported".
_STATUS = {
    "cublas": 15,
    "cudnn": 3000,
    "cusparse": 10,
    "cusolver": 9,
    "cufft": 16,
    "curand": 104,
    "cupti": 27,
    "nccl": 5,
    "nvml": 3,
    r"_*cuda[A-Z]": 801,
    "cu[A-Z]": 801,
}

#: Calls left to NVIDIA's own libraries, which are loaded too, as these need no GPU. GPUDirect Storage is refused by its
#: own library.
_REAL = re.compile(r"cudnnGet(Version|CudartVersion|MaxDeviceVersion|ErrorString|LastErrorString)$|cuFile")


def is_virtual(device: str) -> bool:
    """Return whether a GPU is virtual, by the name that torch reports."""
    return device.startswith(_VIRTUAL)


@dataclass(frozen=True)
class Machine:
    """Machines whose GPUs are virtual; all nodes are simulated on this one."""

    gpu: Device  #: The model of the GPUs.
    ranks: Sequence[int] | None = None  #: The ranks of a run to execute; ``None``: all.

    @property
    def gpu_name(self) -> str:
        """Torch's name for the GPUs."""
        return f"{_VIRTUAL}{self.gpu.name}"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPUs."""
        major, minor = str(self.gpu.capability).split(".")  # typed, 7.5 is a number
        return int(major), int(minor)

    def environment(self, count: int) -> dict[str, str]:
        """Return the variables by which ranks see nodes of ``count`` GPUs; builds the library, see :func:`build`.

        Where only some ranks run, it discards their messages to the others.
        """
        folder = build()
        variables = {
            "LD_PRELOAD": _before(folder / _FILE, "LD_PRELOAD"),
            "LD_LIBRARY_PATH": _before(folder, "LD_LIBRARY_PATH"),
            "PTDBENCH_VIRTUAL_DEVICE": self.gpu.settings(),
            "PTDBENCH_VIRTUAL_COUNT": str(count),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),  # replaces that of real GPUs
        }
        variables["PTDBENCH_VIRTUAL_COMPUTED"] = _computed(folder, variables)
        return variables | ({"PTDBENCH_VIRTUAL_ALONE": "1"} if self.ranks is not None else {})

    def check_ranks(self, size: int) -> None:
        """Refuse ranks that a run of ``size`` does not have; raises ConfigError."""
        if self.ranks is None:
            return
        exist = all(isinstance(rank, int) and 0 <= rank < size for rank in self.ranks)
        if not exist or not self.ranks or len({*self.ranks}) < len(self.ranks):
            rule = f"must be different ranks of the run, which has {plural(size, 'rank')}"
            remedy = f"try numbers from 0 to {size - 1}, or null for all"
            require(Problem("virtual.ranks", list(self.ranks), rule, remedy))


def none() -> None:
    """Choose the real devices."""


def build() -> Path:
    """Build the library for the installed torch, unless it is cached.

    Returns:
        The folder with the library, in ptdbench's cache.

    Raises:
        ConfigError: There is no compiler, no CUDA build of torch, no writable folder, or the platform is not supported.
    """
    torch = _installed()
    folder = user_cache() / "virtual" / _key(torch)
    if re.search(r"[\s:;]", str(folder)):  # the linker would load nothing, and torch would find no driver
        rule = "the dynamic linker takes no blank, colon or semicolon in the path of the library"
        raise _problem("virtual", str(folder), rule, "set XDG_CACHE_HOME to another folder")
    if (folder / _FILE).exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{folder.name}.lock", fallback_to_soft=False):
            if not (folder / _FILE).exists():
                with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                    _compile(Path(partial), torch)
                    Path(partial).chmod(0o755)
                    shutil.rmtree(folder, ignore_errors=True)
                    Path(partial).rename(folder)
                    Path(partial).mkdir()  # so that the context can remove it
    except OSError as error:
        raise _problem("virtual", str(folder), f"the library cannot be kept there: {error}") from None
    return folder


def _computed(folder: Path, variables: Mapping[str, str]) -> str:
    """Return the kinds of kernels that are computed correctly for this torch; tested once, and cached."""
    cached = folder / "computed.json"
    with FileLock(folder.parent / f"{folder.name}.lock", fallback_to_soft=False):
        if not cached.exists():
            write_json(cached, _tested_kinds(variables), durable=False)
        return ",".join(json.loads(cached.read_text()))


def _tested_kinds(variables: Mapping[str, str]) -> list[str]:
    """Return the kinds that pass the self-test, up to one that crashes it; ConfigError if torch does not start."""
    foreign = ("CUDA_", "TORCH_", "PYTORCH_")
    of_user = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join([str(_HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *search_path.module(computed.__name__)],
        env={**of_user, **variables, "PTDBENCH_VIRTUAL_COMPUTED": ",".join(computed.CHECKS), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        words = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise _problem("virtual", None, f"torch does not start on the virtual GPU: {words}")
    return [line for line in done.stdout.splitlines() if line in computed.CHECKS]


@dataclass(frozen=True)
class _Torch:
    """The installed torch, found without importing it."""

    folder: Path
    version: str
    cuda: str

    @property
    def libraries(self) -> list[Path]:
        """Libraries that import GPU calls."""
        inside = (*self.folder.glob("lib/lib*cuda*.so"), *self.folder.glob("lib/libcaffe2_nvrtc.so"))
        return sorted({*inside, *(self.folder / f"lib/lib{name}.so" for name in ("torch_python", "torch_cpu"))})

    @property
    def looks_up(self) -> list[Path]:
        """Libraries that look up names of the driver and NVML at run time."""
        triton = self.folder.parent / "triton"
        return [self.folder / "lib/libc10_cuda.so", *self.folder.glob("lib/libtorch_cuda.so"), *triton.glob("_C/*.so")]

    @property
    def sources(self) -> list[Path]:
        """Sources that Triton compiles at run time, which call the driver."""
        return sorted(self.folder.parent.glob("triton/backends/nvidia/*.c"))

    def includes(self) -> list[Path]:
        """Return the folders of NVIDIA's headers; raises ConfigError if one of these cannot be found."""
        parent = self.folder.parent / "nvidia"
        folders = [*sorted(parent.glob("*/include")), Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]
        with_header = {header: next((f for f in folders if (f / header).is_file()), None) for header in _HEADERS}
        if missing := [header for header, folder in with_header.items() if folder is None]:
            rule = f"a virtual GPU is compiled with NVIDIA's headers, and {', '.join(missing)} is not below {parent}"
            raise _problem("torch", self.version, rule, "install torch with pip, or set CUDA_HOME")
        return list(dict.fromkeys(filter(None, with_header.values())))


def _installed() -> _Torch:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise _problem("platform", platform.platform(), "a virtual GPU needs Linux on x86-64 or aarch64")
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    text = (folder / "version.py").read_text() if folder and (folder / "version.py").exists() else ""
    versions = dict(re.findall(r"^(__version__|cuda|hip)\b.*= '(.+)'$", text, re.MULTILINE))
    version = versions.get("__version__")
    if folder is None or version is None:
        raise _problem("torch", None, "no torch is installed for this Python")
    if "cuda" not in versions:
        kind = "ROCm" if "hip" in versions else "the CPU"
        raise _problem("torch", version, f"a virtual GPU runs torch's build for CUDA, and this one is for {kind}")
    return _Torch(folder, version, versions["cuda"])


def _key(torch: _Torch) -> str:
    """Return the cache key of the library: a digest of the sources, torch, and the libraries that import its calls."""
    identity = sha256(f"{platform.machine()} {torch.folder} {torch.version} {torch.cuda}".encode())
    for source in sorted([*_HERE.rglob("*.[ch]"), *map(Path, (__file__, computed.__file__))]):
        identity.update(source.name.encode() + source.read_bytes())
    for library in [*torch.libraries, *torch.looks_up]:
        identity.update(f"{library.name} {library.stat().st_size}".encode())
    return f"torch-{torch.version}-{identity.hexdigest()[:16]}"


def _compile(folder: Path, torch: _Torch) -> None:
    """Compile and link the sources; then link again, with stubs for the calls that they do not implement."""
    sources = sorted(_HERE.glob("*.c"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    includes = [f"-I{path}" for path in (_HERE / "include", *torch.includes())]
    for source, compiled in zip(sources, objects, strict=True):
        _cc("-c", *includes, "-o", compiled, source)
    _cc("-shared", "-o", folder / _FILE, *objects)
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(wanted(torch) - symbols(folder / _FILE, "defined")))
    _cc("-shared", f"-Wl,-soname,{_FILE}", "-o", folder / _FILE, *objects, stubs)
    for name in _LINKS:
        (folder / name).symlink_to(_FILE)
    for compiled in objects:
        compiled.unlink()


def wanted(torch: _Torch) -> set[str]:
    """Return the calls to a GPU's libraries that torch and Triton may make: undefined symbols, and names looked up."""
    ours = "|".join(_STATUS)
    names = set[str]().union(*(symbols(library, "undefined") for library in torch.libraries))
    names |= set[str]().union(*(texts(library, r"(?:cu[A-Z]|nvml)\w+") for library in torch.looks_up))
    for source in torch.sources:
        names |= set(re.findall(r"\bcu[A-Z]\w+", source.read_text()))  # including arguments of macros
    return {name for name in names if re.match(ours, name) and not _REAL.match(name)}


def symbols(library: Path, which: str) -> set[str]:
    """Return the names that a library has ``"defined"`` for others, or that it leaves ``"undefined"``.

    Raises:
        ConfigError: There are no binutils, which link such libraries too.
        subprocess.CalledProcessError: The file is not a library, or cannot be read.
    """
    table = _output("nm", "-DP", f"--{which}-only", library)
    return set(re.findall(r"^[^ @]+", table, re.MULTILINE))  # without versions


def texts(library: Path, pattern: str) -> set[str]:
    """Return a library's string constants that match: names that it looks up. Raises as :func:`symbols`."""
    constants = _output("readelf", "-p", ".rodata", library)
    return set(re.findall(rf"^  \[ *[0-9a-f]+\]  ({pattern})$", constants, re.MULTILINE))


def _output(*command: str | Path) -> str:
    try:
        return subprocess.run(command, capture_output=True, encoding="latin-1", check=True).stdout
    except FileNotFoundError:
        rule = f"has no {command[0]}, and a virtual GPU needs binutils"
        raise _problem("PATH", os.environ.get("PATH"), rule, "install them") from None


def _stubs(names: Iterable[str]) -> str:
    """Return C source of stubs that report each call as unimplemented."""
    lines = ['#define API __attribute__((visibility("default")))', "int unanswered(const char *name, int status);"]
    for name in sorted(names):
        status = next(status for prefix, status in _STATUS.items() if re.match(prefix, name))
        lines.append(f'API int {name}(void) {{ return unanswered("{name}", {status}); }}')
    return "\n".join(lines) + "\n"


def _cc(*arguments: str | Path) -> None:
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = ["cc", "-std=gnu11", *warnings, "-O1", "-g", "-fPIC", "-pthread", "-fvisibility=hidden"]
    try:
        done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        rule, remedy = "has no cc, and a virtual GPU needs a C compiler", "install gcc or clang"
        raise _problem("PATH", os.environ.get("PATH"), rule, remedy) from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise _problem("cc", arguments[-1], f"the virtual GPU cannot be compiled: {first}")


def _before(path: Path, variable: str) -> str:
    """Return the value of a path variable with ``path`` moved or added to the front."""
    others = [entry for entry in os.environ.get(variable, "").split(":") if entry not in ("", str(path))]
    return ":".join([str(path), *others])


def _problem(option: str, value: object, rule: str, remedy: str = "") -> ConfigError:
    return ConfigError([Problem(option, value, rule, remedy)])
