"""Whole numbers, such as how many tokens go to each expert; and which kernels of the library are trusted."""

import json
import sys

import pytest
import torch

from ptdbench import search_path
from ptdbench.prediction.log import read
from ptdbench.problems import ConfigError
from ptdbench.virtual import computed, machine
from ptdbench.virtual.machine import Machine
from tests.conftest import ROOT
from tests.programs import call
from tests.virtual.conftest import DEVICE, Start

TOKENS, EXPERTS, ACTIVE = 20_000, 8, 2

PROGRAM = f"""
import json
import torch

def count(ids):
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, True)
    hot = torch.nn.functional.one_hot(ids, {EXPERTS}).permute(2, 1, 0)
    order = torch.argsort(ids.flatten(), stable=True)
    counts = mask.sum(dim=0)
    return dict(
        histc=torch.histc(ids.flatten(), bins={EXPERTS}, min=0, max={EXPERTS}).tolist(),
        bincount=torch.bincount(ids.flatten(), minlength={EXPERTS}).tolist(),
        scatter=counts.tolist(),
        clamped=counts.clamp(max=1000).tolist(),
        cast=torch.zeros_like(scores).int().scatter(1, ids, 1).bool().sum(dim=0).long().tolist(),
        where=[len(torch.where(hot[expert])[0]) for expert in range({EXPERTS})],
        sorted=torch.bincount(ids.flatten()[order][: {TOKENS}], minlength={EXPERTS}).tolist(),
        ranks=counts.view(2, -1).sum(dim=1).to("cpu", non_blocking=True).tolist(),
        ends=torch.cat([counts[:4].cumsum(0), counts[4:].cumsum(0)]).tolist(),
    )

scores = torch.randn({TOKENS}, {EXPERTS}, device="cuda")
chosen = scores.topk({ACTIVE}, dim=-1, sorted=False)
turns = torch.arange({TOKENS * ACTIVE}, device="cuda").view({TOKENS}, {ACTIVE}) % {EXPERTS}
print(json.dumps([count(chosen.indices), count(turns), chosen.indices[:5].tolist(), chosen.values.shape]))
"""


def test_a_router_gives_each_expert_its_share(start: Start, environ, tmp_path):
    (tmp_path / "router.py").write_text(PROGRAM)
    command = (sys.executable, "-m", "ptdbench", "virtual", "h100", "--", sys.executable, "router.py")
    done = call(*command, cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    of_scores, of_turns, first, shape = json.loads(done.stdout.splitlines()[0])
    share = TOKENS * ACTIVE // EXPERTS
    ends = [share * (expert % 4 + 1) for expert in range(EXPERTS)]
    half = [share] * (EXPERTS // 2) + [0] * (EXPERTS // 2)
    ways = {name: [share] * EXPERTS for name in ("histc", "bincount", "scatter", "cast", "where")}
    ways["clamped"] = [1000] * EXPERTS
    assert of_scores == of_turns == {**ways, "sorted": half, "ranks": [TOKENS] * 2, "ends": ends}
    assert (first, shape) == ([[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]], [TOKENS, ACTIVE])


COUNTED = """
import torch
from ptdbench.virtual import computed, watch

log = watch.Log()
torch.zeros(1, device="cuda")
torch.backends.cudnn.conv.fp32_precision = "ieee"  # after which torch refuses to tell allow_tf32
log.begin()
for _ in range(2):
    positions = torch.arange(8, device="cuda")
    (torch.cat([positions, positions[:0]]) != 1).cumsum(0).sum()
    log.mark()
    computed.attach()
log.end()
"""


def test_computing_does_not_count_as_operators(start: Start, environ, tmp_path):
    """The predicted time of the host follows from their number."""
    environ = {**environ, **Machine(DEVICE).environment(1), "PTDBENCH_VIRTUAL_LOG": str(tmp_path)}
    done = call(sys.executable, "-c", COUNTED, cwd=ROOT, environ=environ)
    assert done.returncode == 0, done.stderr
    (log,) = read(tmp_path)
    before, computing = (step["operators"].sum() for step in log.steps())
    assert before == computing > 0
    assert not log.facts["convolutions_in_tf32"]


def enabled(monkeypatch: pytest.MonkeyPatch, program: str, variables: dict[str, str]) -> list[str]:
    """What is enabled if this program is the self-test."""
    monkeypatch.setattr(search_path, "module", lambda _: ["-c", program])
    return machine._tested_kinds(variables)


def test_kinds_that_give_other_numbers_or_crash_are_not_enabled(start: Start, monkeypatch):
    first, second, third, *_ = computed.CHECKS
    program = f"""
import os
from ptdbench.virtual import computed
computed.CHECKS |= {{{first!r}: lambda torch, a: [(a, [1])], {third!r}: lambda *_: os.abort()}}
computed.main()
"""
    assert enabled(monkeypatch, program, Machine(DEVICE).environment(1)) == [second]


GROUPED = """
import os
import torch
from ptdbench.virtual import computed, watch

computed.attach()
left = torch.randn(64, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
right = torch.randn(4, 32, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
log = watch.Log()
log.begin()
ends = torch.tensor([16, 16, 48, 64], dtype=torch.int32, device="cuda")
torch.nn.functional.grouped_mm(left, right, offs=ends).backward(torch.ones(64, 16, dtype=torch.bfloat16, device="cuda"))
log.mark()
log.end()
print(watch.read_account()["flops"][""], flush=True)
os._exit(0)  # torch's profiler has run in the threads of the backward pass, and the interpreter does not wait for them
"""


def test_products_of_groups_have_their_mean_sizes(start: Start, environ, tmp_path):
    environ = {**environ, **Machine(DEVICE).environment(1), "PTDBENCH_VIRTUAL_LOG": str(tmp_path)}
    done = call(sys.executable, "-c", GROUPED, cwd=ROOT, environ=environ)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 3 * 2 * 64 * 32 * 16  # the product, and the gradients of both factors
    (step,) = read(tmp_path)[0].steps()
    sizes = {tuple(sorted(dims[:3])) for dims in step["dims"].tolist() if dims[3] == 4}
    assert sizes == {(16, 16, 32)}  # for each of four groups


def test_disabled_kinds_are_not_computed(start: Start, environ):
    """As a new version of torch may have it, by other names of kernels."""
    environ = {**environ, **Machine(DEVICE).environment(1), "PTDBENCH_VIRTUAL_COMPUTED": ""}
    done = call(sys.executable, "-m", "ptdbench.virtual.computed", cwd=ROOT, environ=environ)
    assert done.stdout.splitlines() == [torch.__version__], done.stderr


def test_torch_that_does_not_start_is_quoted(monkeypatch):
    with pytest.raises(ConfigError, match="torch does not start on the virtual GPU: ImportError: no"):
        enabled(monkeypatch, "raise ImportError('no')", {})
