"""Proof of a tensor-parallel plan: on its ranks a model computes what it computes on one.

It runs in fp32 on the host, before any rank of the run exists, in a process of its own: a plan whose proof crashes or
hangs is refused, too. That process imports the model's classes and forks the ranks, as importing takes longer than the
proof; it computes nothing itself, since neither autograd nor threads survive a fork.
"""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ptdbench.files import from_cache, to_cache
from ptdbench.launch import local
from ptdbench.launch.lifetime import die_with_parent
from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import Model, module_of, only_loss, roles_of
from ptdbench.nested import map_tensors, tensors, with_samples
from ptdbench.parallel import tensor
from ptdbench.problems import first_line

#: The largest difference, relative to the largest number of a tensor.
TOLERANCE = 1e-5

#: Gradients are compared with this share of the largest one, if they are smaller: some are zero but for rounding.
_SMALL = 1e-2

#: Seconds that a proof may take.
DEADLINE = 300.0

#: The file that collects what a proof's processes print, and the prefix of a failed rank's last line.
_OUTPUT, _ERROR = "output", "error: "

#: The process that proves plans now, if any.
_provers: list[_Prover] = []


@contextmanager
def in_one_process() -> Iterator[_Prover]:
    """Within the context, one process proves all plans; it starts with the first proof that is not cached."""
    with ExitStack() as stack:
        if not _provers:
            _provers.append(stack.enter_context(_Prover()))
            stack.callback(_provers.clear)
        yield _provers[0]


def prove(model: Model, example: tuple[Any, Tensor], ranks: int) -> str | None:
    """Return how outputs or gradients on ``ranks`` differ from those on one; ``None``: they are equal.

    A proof is kept in the user's cache, by the source of the model's classes.

    Args:
        model: The model, with one block of each kind.
        example: Inputs and targets of one sample on the meta device.
        ranks: Their number, which divides what they share.
    """
    key = {"model": _identity(model), "ranks": ranks, "torch": torch.__version__}
    if from_cache("tensor_plans", key):
        return None
    with in_one_process() as prover:
        difference = prover.ask(model, with_samples(example, 2, "cpu", filled=True), ranks)
    if difference is None:
        with suppress(OSError):
            to_cache("tensor_plans", key, {"equal": True})
    return difference


class _Prover(ExitStack):
    """A process that proves plans one after another; the context ends it, and what it has started."""

    _connection: Connection | None = None
    _folder = Path(os.devnull)

    def ask(self, model: Model, batch: tuple[Any, Tensor], ranks: int) -> str | None:
        """Return what :func:`prove` returns; if the process dies or is too slow, the next call starts another."""
        try:
            if self._connection is None:
                self._folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
                self._connection, other = multiprocessing.Pipe()
                self.enter_context(self._connection)
                with other:
                    self.enter_context(local.beside(_serve, other, self._folder))
            (self._folder / _OUTPUT).write_bytes(b"")
            self._connection.send_bytes(cloudpickle.dumps((model, batch, ranks)))
            if self._connection.poll(DEADLINE):
                difference: str | None = self._connection.recv()
                return difference
            reason = f"the proof is not done after {DEADLINE:g} s{_first_error(self._folder)}"
        except Exception as error:  # third-party code may raise anything
            reason = f"the process of the proof fails{_first_error(self._folder) or f': {first_line(error)}'}"
        self._connection = None
        self.close()
        return reason


def _serve(_environ: Mapping[str, str], connection: Connection, folder: Path) -> None:
    """Answer questions until the process that asks them ends; what models and libraries print goes to a file."""
    local.ignore_signals()  # the other process ends this one
    for stream in (1, 2):
        os.dup2(os.open(folder / _OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            model, batch, ranks = cloudpickle.loads(connection.recv_bytes())
            difference = _on_ranks(model, batch, ranks, torch.float32, folder)
            is_rounding = False
            if difference and "differs" in difference:
                # A loss may enlarge what is rounded, as a contrastive one does, which leaves no difference in fp64.
                is_rounding = not _on_ranks(model, batch, ranks, torch.float64, folder)
            connection.send(None if is_rounding else difference)


def _first_error(folder: Path) -> str:
    """Return the first error that the processes of a proof have printed, or their last line."""
    text = (folder / _OUTPUT).read_text(errors="replace") if (folder / _OUTPUT).is_file() else ""
    lines = [line for line in text.splitlines() if line[:1].strip()]
    errors = [line.removeprefix(_ERROR) for line in lines if "rror" in line]
    return "".join(f": {line}" for line in [*errors, *lines[-1:]][:1])


def _identity(model: Model) -> str:
    """Return a hash of all that a proof depends on: the plan, the model and its source, and ours."""
    module = module_of(model)
    kinds = {
        kind for part in module.modules() for kind in type(part).__mro__ if not kind.__module__.startswith("torch.")
    }
    sources = {inspect.getsource(tensor)}
    for kind in kinds:
        with suppress(OSError, TypeError):  # a class of a notebook, or of C
            sources.add(inspect.getsource(inspect.getmodule(kind) or kind))
    configs = [getattr(part, "config", "") for part in module.children()]  # Hugging Face
    described = [module, *configs, roles_of(model), model.tied(), *sorted(sources)]
    return sha256("\n".join(map(str, described)).encode()).hexdigest()


@torch.no_grad()
def _fill(model: Model) -> None:
    """Fill a model with random weights: zeros and small numbers would hide what is computed with them."""
    module, generator = module_of(model), torch.Generator().manual_seed(0)
    materialize(model, module, device="cpu", seed=0)
    module.eval()  # no dropout, and batch norms keep their statistics
    for weight in module.parameters():
        if weight.is_floating_point() and weight.numel():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise, alpha=0.5 / (weight.shape[-1] if weight.dim() else 1) ** 0.5)


def _computed(model: Model, batch: tuple[Any, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a model's modules in a pass, in order, and then the gradients, by name."""
    results: dict[str, Tensor] = {}

    def note(name: str, value: Tensor) -> None:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        results.setdefault(name, whole.detach().clone())

    def note_output(name: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
        if leaves := [leaf for leaf in tensors(output) if leaf.is_floating_point()]:
            note(f"the output of {name}" if name else "the output", leaves[0])

    module = module_of(model)
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            hooks.callback(part.register_forward_hook(partial(note_output, name)).remove)
        with suppress(TypeError):  # of a model that has no outputs, only a loss
            if not only_loss(model):
                module(batch[0])
        loss = module(*batch)
    note("the loss", loss)
    loss.backward()
    weights = dict(module.named_parameters())
    tensor.add_up_partial([*weights.values()])
    for name, weight in weights.items():
        if weight.grad is not None:
            note(f"the gradient of {name}", weight.grad)
    return results


def _on_ranks(model: Model, batch: tuple[Any, Tensor], ranks: int, dtype: torch.dtype, folder: Path) -> str | None:
    """Return how a rank fails, or the first difference on the first rank that has any."""
    fork = multiprocessing.get_context("fork")
    store, *files = (folder / name for name in ("store", *map(str, range(ranks))))
    for file in (store, *files):
        file.unlink(missing_ok=True)
    workers = [fork.Process(target=_be_rank, args=(model, batch, dtype, files, rank, store)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    while not any(statuses := [worker.exitcode for worker in workers]):
        if None not in statuses:
            return next(filter(None, map(Path.read_text, files)), None)
        wait([worker.sentinel for worker, status in zip(workers, statuses, strict=True) if status is None])
    status = next(filter(None, statuses))
    for worker in workers:
        worker.kill()
        worker.join()
    return f"a rank {f'is ended by {signal.Signals(-status).name}' if status < 0 else 'fails'}{_first_error(folder)}"


def _be_rank(
    model: Model, batch: tuple[Any, Tensor], dtype: torch.dtype, files: Sequence[Path], rank: int, store: Path
) -> None:
    """Write how this rank's numbers differ from a single rank's."""
    die_with_parent()
    try:
        _fill(model)
        module_of(model).to(dtype)
        batch = map_tensors(lambda it: it.to(dtype) if it.is_floating_point() else it, batch)
        expected = _computed(copy.deepcopy(model), batch)
        ranks = len(files)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        tensor.parallelize(model, module_of(model), mesh, sequence=False)
        files[rank].write_text(_difference(expected, _computed(model, batch)) or "")
    except Exception as error:  # third-party code may raise anything
        sys.exit(f"{_ERROR}{first_line(error)}")


def _difference(expected: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor that differs; an output of another shape is a rank's part."""
    largest = {name: float(value.abs().max()) for name, value in expected.items() if value.numel()}
    of_gradients = _SMALL * max(size for name, size in largest.items() if name.startswith("the gradient"))
    for name, size in largest.items():
        value, other, is_gradient = expected[name], computed.get(name), name.startswith("the gradient")
        if other is None or other.shape != value.shape:
            if is_gradient:
                return f"{name} is missing"
        elif not float((value - other).abs().max()) <= TOLERANCE * max(size, of_gradients * is_gradient):
            return f"{name} differs by {float((value - other).abs().max() / (size or 1.0)):.0e}"
    return None
