"""Watches a process of any program on virtual GPUs: its steps, and what each of them has the GPU do.

``preload/sitecustomize.py`` loads this file in the program's own Python, so it imports nothing but torch. A step ends
when the first of the program's optimizers has stepped after a pass; in a program without optimizers, when a profiler
of torch's has. The report of a process is a JSON file named after it: it exists from the first use of a GPU, and is
written again after each step, when memory runs out, and at the end.
"""

import ctypes
import json
import math
import os
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Lock, Thread, get_ident
from typing import Any

#: Variables: the folder of the reports; after how many steps to stop watching; set if Python stacks of allocations are
#: to be kept, in a snapshot for torch's viewer beside the report; the folder of the logs, if any.
FOLDER, STEPS, STACKS, LOGS = (f"PTDBENCH_VIRTUAL_{name}" for name in ("REPORTS", "STEPS", "STACKS", "LOG"))

#: Set if a process is one of several whose messages reach nobody.
ALONE = "PTDBENCH_VIRTUAL_ALONE"

#: Steps of a program before those that are logged, and how many these are: the first compiles, and creates the
#: optimizer's state.
BEFORE_LOG, LOGGED = 2, 2

#: Why operators are not counted: torch has one profiler, and the program's goes first.
PROFILED = "its own profiler runs meanwhile"

#: Allocations whose stacks torch keeps.
_MOST_ALLOCATIONS = 1_000_000

#: Reads of single values without new data after which a program is taken for endless, and seconds between looks.
_MOST_READS, _LOOK_SECONDS = 20_000, 2.0

#: Parts of the names of kernels of forward and backward passes: what had none since the last step is not a step, such
#: as one that only creates the optimizer's state, or a further part of the weights.
_OF_PASSES = ("gemm", "cudnn", "conv", "triton_", "flash", "cutlass", "fmha")

#: Loads of the same tensor by a thread of a kernel of Inductor, at most.
_MOST_LOADS = 4

#: The groups of an account: counts by name.
Account = dict[str, Counter[str]]


def attach() -> None:
    """Watch this process from its first use of a GPU; called when torch has been imported."""
    import torch

    if os.environ.get(FOLDER):
        torch.cuda._lazy_call(partial(_safely, _Watch, Path(os.environ[FOLDER])))


def read_account() -> Account:
    """Return what the devices of this process have done since it started; not thread-safe.

    ``kernels`` by name, ``calls`` and ``bytes`` of messages by operation, ``used``: bytes in use by device; without a
    name ``flops`` of products, and ``reads`` of single values.
    """
    account: Account = {name: Counter() for name in ("kernels", "calls", "bytes", "flops", "reads", "used")}
    read = ctypes.CDLL(None).ptdbench_virtual_account
    read.restype = ctypes.c_char_p
    for line in read().decode(errors="replace").splitlines():
        group, name, *figures = line.split("\t")
        if group == "kernel":
            account["kernels"][name] += int(figures[0])
        elif group == "message":
            account["calls"][name] += int(figures[0])
            account["bytes"][name] += int(figures[1])
        elif group in ("flops", "reads"):
            account[group][""] = int(name)
        else:
            account["used"][name] = int(figures[0])
    return account


def since(before: Account, account: Account) -> Account:
    """Return what an account has more than an earlier one."""
    return {group: counts - before.get(group, Counter()) for group, counts in account.items()}


def communicating() -> list[Any]:
    """Return this process's groups of several ranks that communicate by NCCL."""
    import torch

    groups: Any = torch.distributed
    if not (groups.is_available() and groups.is_initialized()):
        return []
    every = groups.distributed_c10d._world.pg_map
    return [group for group in every if group.size() > 1 and "nccl" in groups.get_backend_config(group)]


def settle() -> None:
    """Wait until NCCL's watchdog has seen the end of all work, as it would during the slower steps of a real GPU.

    Up to torch 2.14 it keeps the tensors of messages alive until then, and polls ten times a second, so that their
    memory would depend on this machine.
    """
    import torch

    for group in communicating():
        if isinstance(group._get_backend(torch.device("cuda")), torch.distributed.ProcessGroupNCCL):
            group._wait_for_pending_works()


class Log:
    """The log of this process, which :mod:`ptdbench.prediction.log` reads; false without a folder, or after its end."""

    def __init__(self) -> None:
        self._folder = os.environ.get(LOGS)
        self._announced: list[tuple[Any, Any]] = []
        self._counts = False  #: Whether torch's profiler runs for the log.

    def __bool__(self) -> bool:
        return bool(self._folder)

    def begin(self) -> None:
        """Log what this process has its GPU do from now on, which must be the beginning of a step.

        The library counts the operators that torch's profiler announces to it.

        Raises:
            RuntimeError: Operators cannot be counted here.
            OSError: The log cannot be written.
        """
        import torch

        if torch.autograd._profiler_enabled():
            raise RuntimeError(PROFILED)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("they end inside the backward pass")
        me, pid = identity(), os.getpid()
        cudnn: Any = torch.backends.cudnn
        in_tf32 = cudnn.conv.fp32_precision == "tf32"  # after a program has set it, reading allow_tf32 raises
        of_torch = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        facts = {**me, "pid": pid, "alone": bool(os.environ.get(ALONE)), "convolutions_in_tf32": in_tf32, **of_torch}
        path = f"{self._folder}/{me['rank'] if me['rank'] >= 0 else pid}"
        Path(str(self._folder)).mkdir(parents=True, exist_ok=True)
        if not ctypes.CDLL(None).ptdbench_virtual_log(path.encode(), json.dumps(facts).encode()):
            raise OSError(f"{LOGS}={self._folder}: the log cannot be written there")
        self._announced = [*_announce_bytes()]
        _profile()
        self._counts = True
        self.mark()

    def mark(self) -> None:
        """Mark the end of a step, and the beginning of the next one."""
        ctypes.CDLL(None).ptdbench_virtual_mark(b"step")

    def end(self) -> None:
        """End the log, if it has begun."""
        import torch

        self._folder = None
        ctypes.CDLL(None).ptdbench_virtual_log(None, None)
        for launcher, run in self._announced:
            launcher.run = run
        if self._counts:
            self._counts = False
            torch._C._autograd._disable_profiler()


def identity() -> dict[str, int]:
    """Return ``rank`` and ``world_size`` of this process, by torch or its launcher; -1 and 1 without either."""
    import torch

    groups = torch.distributed
    if groups.is_available() and groups.is_initialized():
        return {"rank": groups.get_rank(), "world_size": groups.get_world_size()}
    return {"rank": int(os.environ.get("RANK", "-1")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}


def _profile() -> None:
    """Start torch's profiler in this thread and those of its backward passes, without shapes, stacks or memory."""
    from torch._C import _autograd
    from torch._C import _profiler as of_torch

    _profiler: Any = of_torch
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says nothing
    config = _profiler.ProfilerConfig(_profiler.ProfilerState.KINETO, *[False] * 5, _profiler._ExperimentalConfig())
    activities = {_profiler.ProfilerActivity.CPU, _profiler.ProfilerActivity.CUDA}
    _autograd._prepare_profiler(config, activities)
    _autograd._enable_profiler(config, activities)


def _announce_bytes() -> Iterator[tuple[Any, Any]]:
    """Have Triton's kernels announce their bytes to the library, which knows none of their arguments.

    Yields the classes whose ``run`` is replaced, with what it was.
    """
    announce: Any = ctypes.CDLL(None).ptdbench_virtual_bytes
    announce.argtypes = [ctypes.c_size_t, ctypes.c_int]
    for module, name, bytes_of in (
        ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", _bytes_of_inductor),
        ("triton.runtime.jit", "JITFunction", _bytes_of_triton),
    ):
        if launcher := getattr(sys.modules.get(module), name, None):
            yield launcher, launcher.run
            launcher.run = _announcing(launcher.run, bytes_of, announce)


def _announcing(run: Any, bytes_of: Any, announce: Any) -> Any:
    def announcing(kernel: Any, *arguments: Any, **options: Any) -> Any:
        if count_and_guess := _safely(bytes_of, kernel, arguments, options):
            announce(*count_and_guess)
        return run(kernel, *arguments, **options)

    return announcing


def _bytes_of_inductor(kernel: Any, arguments: Any, _: Any) -> tuple[int, bool]:
    """Return the bytes of a kernel of Inductor, and whether that is a guess.

    Each tensor counts once, and one that is changed in place twice. Of a tensor much larger than what the kernel goes
    through, such as the table of an embedding, only so many elements count.
    """
    named = dict(zip(kernel.triton_meta["signature"], arguments, strict=False))
    passed = math.prod(count for name, count in named.items() if name.endswith("numel"))
    total, guessed = 0, False
    for name, tensor in named.items():
        if hasattr(tensor, "element_size"):
            picks = tensor.numel() > _MOST_LOADS * passed
            guessed |= picks
            times = 2 if name in kernel.mutated_arg_names else 1
            total += (passed if picks else tensor.numel()) * tensor.element_size() * times
    return total, guessed


def _bytes_of_triton(kernel: Any, arguments: Any, options: Any) -> tuple[int, bool]:
    """Likewise of any other kernel, a guess unless its ``rewrites`` says if it changes its first argument in place."""
    tensors = [value for value in (*arguments, *options.values()) if hasattr(value, "element_size")]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    rewrites = getattr(kernel, "rewrites", None)
    return sum(sizes + sizes[:1] * bool(options.get(rewrites, rewrites))), rewrites is None


class _Watch:
    """The report of this process.

    Args:
        folder: The folder of the reports.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        self._torch, self._path = torch, folder / f"{os.getpid()}.json"
        self._lock = Lock()
        self._most_steps = int(os.environ.get(STEPS) or sys.maxsize)
        self._leader: object = None  #: A reference to the optimizer whose steps count, or the name of a profiler.
        self._before: Account = {}  #: At the last step.
        self._devices: dict[int, dict[str, int]] = {}
        facts = {"pid": os.getpid(), "command": sys.argv, "steps": 0, "devices": self._devices}
        self._report: dict[str, Any] = identity() | facts
        self._log = Log()
        ctypes.CDLL(None).ptdbench_virtual_note_crashes()
        self._hook()
        if os.environ.get(STACKS):
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")
        Finalize(None, partial(_safely, self._exit), exitpriority=0)  # also at the end of a forked process
        Thread(target=self._end_endless, args=(get_ident(),), daemon=True).start()
        self._write()

    def _hook(self) -> None:
        """Have torch tell of steps, resets of its peaks, and allocations that fail."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda stepped, *_: _safely(self._optimizer_stepped, stepped))
        steps: Any = self._torch.autograd.profiler.KinetoStepTracker
        steps.increment_step = _told(steps.increment_step, self._profiler_stepped)
        profiler: Any = self._torch.autograd.profiler
        for name in ("_prepare_profiler", "_enable_profiler"):
            setattr(profiler, name, _told(getattr(profiler, name), lambda *_: self._give_up_log(PROFILED)))
        compiled: Any = self._torch._C
        compiled._cuda_resetPeakMemoryStats = _told(compiled._cuda_resetPeakMemoryStats, lambda _: self._measure())
        compiled._cuda_attach_out_of_memory_observer(partial(_safely, self._out_of_memory))

    def _optimizer_stepped(self, optimizer: object) -> None:
        leader = self._leader() if isinstance(self._leader, weakref.ref) else None
        if leader in (None, optimizer) and self._step():
            self._leader = weakref.ref(optimizer)

    def _profiler_stepped(self, profiler: str) -> None:
        if self._leader in (None, profiler) and self._step():
            self._leader = profiler

    def _step(self) -> bool:
        """Take note of a step, if it has been one."""
        account = self._measure()
        step = since(self._before, account)
        if self._is_over() or not any(part in kernel for kernel in step["kernels"] for part in _OF_PASSES):
            return False
        self._before = account
        self._report |= {**identity(), "steps": self._report["steps"] + 1, "step": step}
        if self._report["steps"] == 1:
            allocated = {number: device.get("allocated", 0) for number, device in self._devices.items()}
            self._report["first"] = step | {"allocated": allocated}
        self._note_in_log(self._report["steps"] - BEFORE_LOG)
        self._write()
        settle()
        return True

    def _note_in_log(self, logged: int) -> None:
        """Begin, mark or end the log, of which so many steps have been taken; below 0: none is due yet."""
        if not self._log or not 0 <= logged <= LOGGED:
            return
        try:
            (self._log.mark if logged else self._log.begin)()
            if logged == LOGGED:
                self._log.end()
        except Exception as error:
            self._give_up_log(str(error))

    def _give_up_log(self, why: str) -> None:
        if self._log:
            self._report["unlogged"] = f"its steps cannot be logged: {why}"
            self._log.end()

    def _is_over(self) -> bool:
        return bool(self._report["steps"] >= self._most_steps)

    def _read(self) -> Account:
        """Return what the devices have done since the process started, and note how much memory was in use at most."""
        with self._lock:
            account = read_account()
        for number, used in account.pop("used").items():
            self._devices.setdefault(int(number), {})["used"] = used
        return account

    def _measure(self) -> Account:
        """Note the peaks of torch's allocator, and the step in progress where they have grown; return the account."""
        account = self._read()
        for number, device in self._devices.items():
            peaks = self._torch.cuda.memory_stats(number)
            for name in ("allocated", "reserved"):
                if (peak := peaks.get(f"{name}_bytes.all.peak", 0)) > device.get(name, -1):
                    device |= {name: peak, f"{name}_step": self._report["steps"] + 1}
        return account

    def _out_of_memory(self, device: int, size: int, total: int, free: int) -> None:
        self._report["out_of_memory"] = size
        self._end()

    def _end_endless(self, main: int) -> None:
        """End a process that waits for a value: it has read so many of the GPU, without a step or new data."""
        while self._read()["reads"][""] - self._before.get("reads", Counter())[""] < _MOST_READS:
            time.sleep(_LOOK_SECONDS)
        stack = "".join(traceback.format_stack(sys._current_frames().get(main)))
        reason = "it waits for a value of the GPU, and nothing computes there; see the loop below, and omit it"
        print(f"virtual GPU: this program never ends: {reason}\n{stack}", file=sys.stderr, flush=True)
        self._end()
        os._exit(1)

    def _exit(self) -> None:
        self._end()
        if self._log:
            self._log.end()  # torch crashes when a process exits while its profiler runs

    def _end(self) -> None:
        if not self._is_over():
            self._report["total"] = self._measure()
        if os.environ.get(STACKS):
            self._torch.cuda.memory._dump_snapshot(str(self._path.with_suffix(".pickle")))
        self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._report))
        partial.replace(self._path)


def _safely(function: Any, *arguments: Any) -> Any:
    """Call a function of this file, whose faults must not end the program that it watches."""
    try:
        return function(*arguments)
    except Exception:
        advice = "virtual GPU: a fault of ptdbench, and none of this program; please report it with what stands above"
        print(f"{traceback.format_exc()}{advice}", file=sys.stderr, flush=True)


def _told(function: Any, tell: Any) -> Any:
    """Return a function that tells its arguments before it does its work."""

    def telling(*arguments: Any, **options: Any) -> Any:
        _safely(tell, *arguments)
        return function(*arguments, **options)

    return telling
