"""The parts of the acceptance run: each a function whose docstring says what it shows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.script import ROOT
from ptdbench.peaks import dense_peak
from ptdbench.records.run_record import typed
from ptdbench.report.remarks import reason

from .session import (
    CHECKED_STEPS,
    Record,
    Session,
    largest_difference,
    plausible,
    speed,
    speed_text,
)

STRATEGIES = ("single", "ddp", "fsdp", "pdp")

#: Largest relative difference of a loss. A GPU adds up in another order from run to run, and every step amplifies that;
#: a wrong gradient is off by far more, as long as the losses move at all.
FP32, IMAGES, NARROW = 1e-4, 1e-3, 2e-2

#: The shares of the data sheet's peak between which the fastest product of a healthy GPU lies: of tensor cores, and of
#: other units, which draw less power and so keep their clock.
CEILING = (0.6, 0.9)
CEILING_FP32 = (0.6, 1.0)

#: The MFU to reach in bf16 on one GPU.
GOALS = {"gpt_small": 0.5, "gpt_xl": 0.6}

#: What several runs in one process may differ by from fresh processes: throughput and peak memory.
SPEED_TOLERANCE, MEMORY_TOLERANCE = 0.03, 0.02

#: The shares of a step's time and of its memory that may be ``other``.
UNEXPLAINED = 0.05, 0.1

#: The peak of one step, as a share of that of the run, from which its allocations have been seen.
SEEN = 0.8

#: A run that does not fit must say so within this time, the start of its processes included.
OOM_SECONDS = 120

SGD = ("optimizer=sgd", "optimizer.lr=0.01", f"train.steps={CHECKED_STEPS}")


def numbers(session: Session) -> None:
    """Losses in fp32 of every strategy, eager and compiled, against single, with SGD."""
    # SGD, because Adam would hide gradients of the wrong scale.
    common = (*_small(session), *SGD)
    reference = session.reference("single", "parallel=single", *common)
    for strategy in STRATEGIES:
        for mode in ("false", "layers", *(("whole",) if strategy in ("single", "ddp") else ())):
            if (strategy, mode) != ("single", "false"):
                options = (f"parallel={strategy}", f"compile={mode}", *common)
                session.follows(f"{strategy} compile={mode}", reference, FP32, *options)


def narrow(session: Session) -> None:
    """Losses in bf16 and fp16 of every strategy, eager and compiled, against single in fp32, with AdamW."""
    common = (*_small(session), f"train.steps={CHECKED_STEPS}")
    reference = session.reference("single fp32", "parallel=single", *common)
    for precision, modes in {"bf16": ("false", "layers"), "fp16": ("layers",)}.items():
        for strategy in STRATEGIES:
            for mode in modes:
                options = (f"parallel={strategy}", f"precision={precision}", f"compile={mode}")
                session.follows(f"{strategy} {precision} compile={mode}", reference, NARROW, *options, *common)
    if session.device == "cuda":
        session.follows("single tf32", reference, NARROW, "parallel=single", "precision=tf32", *common)


def ceilings(session: Session) -> None:
    """Matrix products against the data sheet's peak, and workload=check."""
    shapes = () if session.device == "cuda" else ("workload.shapes=[256]",)
    if not (found := session.well("matmul", "workload=matmul", *shapes)):
        return
    best: dict[str, float] = {}
    for product in found["matmul"]["ranks"][0]["products"]:
        best[product["dtype"]] = max(best.get(product["dtype"], 0.0), product["median"])
    for dtype, rate in best.items():
        peak, why = dense_peak(session.device_name, dtype)
        share = rate / peak if peak else None
        least, most = CEILING_FP32 if dtype == "fp32" else CEILING
        passed = share is None or least <= share <= most
        of_peak = f"{share:.1%} of the peak, {least:.0%} to {most:.0%} expected" if share else why
        said = f"{rate / 1e12:,.1f} TFLOP/s: {of_peak}"
        session.tell(f"matmul {dtype}", passed, said, by="times", rate=rate, share=share)
    checked = session.run("check", "workload=check")
    verdict = checked.get("check", {}).get("verdict") if checked["status"] == "ok" else reason(typed(checked))
    session.tell("check", checked["status"] == "ok", str(verdict), verdict=verdict)


def images(session: Session, precision: str, tolerance: float) -> None:
    """ResNet: losses under single, ddp and fsdp, eager and compiled."""
    if precision == "tf32" and session.device == "cpu":
        return
    common = (*session.sizes.images, "optimizer=sgd", "optimizer.lr=0.05", f"train.steps={CHECKED_STEPS}")
    reference = session.reference("single fp32", "parallel=single", *common)
    for strategy in ("single", "ddp", "fsdp"):
        for mode in ("false", "layers"):
            if (precision, strategy, mode) != ("fp32", "single", "false"):
                options = (f"parallel={strategy}", f"precision={precision}", f"compile={mode}")
                session.follows(f"{strategy} {precision} compile={mode}", reference, tolerance, *options, *common)


def small(session: Session) -> None:
    """The fastest bf16 step of the small model on one device; its MFU is to be at least 50 %."""
    batches = (16, 32, 64) if session.kind == "cuda" else (2,)
    found = [
        _one_device(session, session.sizes.model, batch, f"compile={mode}")
        for batch in batches
        for mode in ("false", "layers", "whole")
    ]
    _goal(session, session.sizes.model, found)


def large(session: Session, mode: str, precision: str) -> None:
    """The large model at several micro-batches; its MFU is to be at least 60 %."""
    options = (f"compile={mode}", f"precision={precision}")
    found = [_one_device(session, session.sizes.large, size, *options) for size in session.sizes.micro_batches]
    _goal(session, session.sizes.large, found)


def beside(session: Session, size: str, rival: str) -> None:
    """The same step of another implementation beside ours, by turns in one process."""
    rounds = {
        "small": (session.sizes.model, "--batch=16", "--steps=50"),
        "large": (session.sizes.large, "--batch=8", "--steps=20"),
    }
    tiny = ("--batch=2", "--sequence=32", "--steps=6", "--warmup=1")
    model, *options = rounds[size]
    what = (f"--model={model}", f"--against={rival}", f"--device={session.device}", "--json")
    for mode in ("false", "layers", "whole"):
        how = options if session.kind == "cuda" else tiny
        done = _script("model_speed.py", *what, *how, f"--modes={mode}")
        if done.returncode:
            session.tell(f"{model} {mode} against {rival}", False, _last_line(done.stderr))
            continue
        figures = json.loads(_last_line(done.stdout))[mode]
        ratio = figures["ratio"]
        said = f"our step takes {ratio:.3f} of theirs ({figures['ours']:.4f} s), required below 1"
        session.tell(f"{model} {mode} against {rival}", ratio < 1, said, by="times", **figures)


def processes(session: Session) -> None:
    """Five runs in one process against five in fresh ones: speed within 3 %, memory within 2 %."""
    common = (*_small(session), "parallel=single", f"train.steps={session.sizes.steps}", "compile=layers")
    seeds = range(1, 6)
    together = session.launched("together", "seed=1,2,3,4,5", *common)
    apart = [session.launched(f"apart-{seed}", f"seed={seed}", *common)[0] for seed in seeds]
    unwell = [found for found in (*together, *apart) if found["status"] != "ok"]
    if unwell or len(together) != len(apart):
        said = reason(typed(unwell[0])) if unwell else f"{len(together)} of {len(apart)} in one process"
        session.tell("runs", False, said)
        return
    pairs = [(_rate(one) / _rate(other), one, other) for one, other in zip(together, apart, strict=True)]
    ratio = median(pair[0] for pair in pairs)
    memory = max(_peak(one) / _peak(other) for _, one, other in pairs)
    said = f"{ratio:.3f} of fresh processes (median of {len(pairs)}), within {SPEED_TOLERANCE:.0%}"
    session.tell("throughput", abs(ratio - 1) <= SPEED_TOLERANCE, said, by="times", ratio=ratio)
    said = f"{memory:.3f} of fresh processes (largest), within {MEMORY_TOLERANCE:.0%}"
    session.tell("peak memory", abs(memory - 1) <= MEMORY_TOLERANCE, said, by="memory", ratio=memory)


def endings(session: Session) -> None:
    """A resumed run follows one that was not interrupted; a run that does not fit says so in seconds."""
    common = (*_small(session), "parallel=single", "optimizer=sgd", "optimizer.lr=0.01")
    whole = session.run("whole", *common, "train.steps=10")
    first = session.run("first-half", *common, "train.steps=5", "checkpoint.every_steps=5")
    resumed = session.run("second-half", *common, "train.steps=10", f"resume={first['directory']}")
    ended = [one for one in (whole, first, resumed) if one["status"] != "ok"]
    if ended:
        session.tell("resume", False, reason(typed(ended[0])))
    else:
        off = largest_difference(resumed["losses"][-5:], whole["losses"][-5:])
        said = f"steps 5 to 9 off by {off:.1e}, at most {FP32:.0e}"
        session.tell("resume", off <= FP32, said, by="numbers", off=off)
    if session.device == "cuda":
        started = time.monotonic()
        # More than any GPU has, and no tensor of 2**31 elements, at which a kernel might fail first.
        options = ("parallel=single", "precision=bf16", "train.global_batch=192", "train.steps=3")
        found = session.run("out-of-memory", "model=gpt_xl", *options)
        seconds = time.monotonic() - started
        said = f"{found['status']} after {seconds:.0f} s, at most {OOM_SECONDS}"
        session.tell("out of memory", found["status"] == "oom" and seconds < OOM_SECONDS, said, seconds=seconds)


def explained(session: Session) -> None:
    """Phases and memory of a step under every strategy: at most 5 % of its time and 10 % of its memory unexplained."""
    for strategy in STRATEGIES:
        steps = f"train.steps={session.sizes.steps}"
        options = (f"parallel={strategy}", "profile.trace=true", steps, *_small(session))
        if not (found := session.well(strategy, *options)):
            continue
        phases, memory = found["phases"] or {}, found.get("memory") or {}
        if not phases.get("steps") or not memory.get("ranks"):
            reasons = [str(one["reason"]) for one in (phases, memory) if one.get("reason")]
            session.tell(strategy, False, "; ".join(reasons) or "the record has no phases or no memory")
            continue
        share = max(phases["ranks"]["other"]) / phases["step_seconds"]
        session.tell(f"{strategy} time", share <= UNEXPLAINED[0], f"{share:.1%} of a step is other", share=share)
        amounts = {kind: max(of_ranks) for kind, of_ranks in memory["ranks"].items()}
        total = sum(amounts.values())
        share, of_run = amounts["other"] / total, total / _peak(found)
        said = f"{share:.1%} of {total / 2**20:,.0f} MiB is other; the peak of this step is {of_run:.2f} of the run's"
        # A CPU's peak is that of its process. On a GPU what is too little has not been seen by the profiler.
        is_seen = amounts["activations"] > 0 and (session.device == "cpu" or of_run >= SEEN)
        passed = share <= UNEXPLAINED[1] and is_seen
        session.tell(f"{strategy} memory", passed, said, share=share, of_run=of_run, **amounts)


def two_ranks(session: Session) -> None:
    """Two ranks on one device over gloo: losses of what gloo can carry, against single or the same on the CPU."""
    common = (*_small(session), *SGD)
    reference = session.reference("single", "parallel=single", *common)
    two = ("backend=gloo", "cluster.ranks_per_node=2")
    options = (*two, *common)
    session.follows("ddp of 2", reference, FP32, "parallel=ddp", *options)
    others = {name: [f"parallel={name}"] for name in ("fsdp", "pdp", "tp")}
    for method in ("ulysses", "ring"):
        others[method] = ["parallel=ddp", "parallel.context=2", f"parallel.context_method={method}"]
    for name, layout in others.items():
        _carried(session, f"{name} of 2", reference, *layout, *options)


def _carried(session: Session, name: str, reference: Sequence[float], *overrides: str) -> None:
    """A run over gloo, if gloo carries it: it has not every operation for a GPU's memory, and says so."""
    found = session.run(name, *overrides)
    if found["status"] == "ok":
        session.compare(name, found, reference, FP32)
    else:  # any other error is a fault
        refused = "gloo" in str(found["error"]["message"]).lower()
        session.tell(name, refused, f"{'not carried by gloo: ' * refused}{reason(typed(found))}")


def silent(session: Session) -> None:
    """The host never waits for the device within a step: torch's synchronization guard raises where it would."""
    # In bf16: torch's grouped products in fp32 wait for the counts of each expert.
    of_experts = {
        f"experts {balance}": f"model=moe_tiny precision=bf16 model.router.balance={balance}"
        for balance in ("loss", "forced")
    }
    for name, words in {**{one: f"precision={one}" for one in ("fp32", "bf16", "fp16")}, **of_experts}.items():
        options = (*_small(session), f"device={session.device}", "train.clip_norm=1", *words.split())
        done = _script("silent_steps.py", *options)
        session.tell(name, not done.returncode, _last_line(done.stdout or done.stderr))


def _script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _small(session: Session) -> tuple[str, ...]:
    return f"model={session.sizes.model}", f"train.global_batch={session.sizes.batch}"


def _one_device(session: Session, model: str, batch: int, *overrides: str) -> Record:
    typed = {"precision": "precision=bf16", **{one.partition("=")[0]: one for one in overrides}}.values()
    name = f"{model} {batch} {' '.join(typed)}"
    steps = f"train.steps={session.sizes.steps}"
    return session.measured(name, f"model={model}", "parallel=single", f"train.global_batch={batch}", steps, *typed)


def _goal(session: Session, model: str, found: list[Record]) -> None:
    """The best MFU against the goal; without a peak on record there is nothing to compare, but something must run."""
    if not any(one["status"] == "ok" for one in found):
        session.tell("goal", False, "no size ran")
        return
    known = [one for one in found if one["status"] == "ok" and one["metrics"]["mfu"] is not None]
    if not known or model not in GOALS:
        return
    best = max(known, key=lambda one: one["metrics"]["mfu"])
    share, goal = best["metrics"]["mfu"], GOALS[model]
    verdict = "reached" if share >= goal else f"missed by {goal - share:.1%}"
    # Not a failure: the figure is what somebody has to believe, and a slower GPU is not a wrong one.
    session.tell("goal", plausible(best), f"best {speed_text(best)}; {goal:.0%} is the goal: {verdict}", **speed(best))


def _rate(found: Mapping[str, Any]) -> float:
    return float(found["metrics"]["samples_per_second"])


def _peak(found: Mapping[str, Any]) -> float:
    return float(found["metrics"]["peak_memory_bytes"])


def _of_mode(mode: str, precision: str = "bf16") -> Callable[[Session], None]:
    part = partial(large, mode=mode, precision=precision)
    part.__doc__ = f"The large model in {precision} with compile={mode}, at several micro-batches."
    return part


def _of_images(precision: str, tolerance: float) -> Callable[[Session], None]:
    part = partial(images, precision=precision, tolerance=tolerance)
    part.__doc__ = f"ResNet in {precision} under single, ddp and fsdp, eager and compiled: losses."
    return part


def _of_rival(size: str, rival: str, name: str) -> Callable[[Session], None]:
    part = partial(beside, size=size, rival=rival)
    part.__doc__ = f"The same step of {name} beside ours, by turns in one process: the {size} model."
    return part


PARTS: dict[str, Callable[[Session], None]] = {
    "numbers": numbers,
    "narrow": narrow,
    "ceilings": ceilings,
    "images-fp32": _of_images("fp32", IMAGES),
    "images-tf32": _of_images("tf32", NARROW),
    "images-bf16": _of_images("bf16", 5 * NARROW),
    "small": small,
    "large-eager": _of_mode("false"),
    "large-layers": _of_mode("layers"),
    "large-whole": _of_mode("whole"),
    "large-autotune": _of_mode("autotune"),
    "large-fp8": _of_mode("layers", "fp8"),
    "large-fp8-tensorwise": _of_mode("layers", "fp8_tensorwise"),
    "beside-nanogpt": _of_rival("small", "nanogpt", "nanoGPT's recipe"),
    "beside-transformers": _of_rival("small", "transformers", "transformers' GPT-2"),
    "beside-nanogpt-large": _of_rival("large", "nanogpt", "nanoGPT's recipe"),
    "beside-transformers-large": _of_rival("large", "transformers", "transformers' GPT-2"),
    "processes": processes,
    "endings": endings,
    "explained": explained,
    "two-ranks": two_ranks,
    "silent": silent,
}

#: Those whose verdicts need no quiet machine, so that they run beside each other.
UNTIMED = ("numbers", "narrow", "images-fp32", "images-tf32", "images-bf16", "two-ranks", "silent")
