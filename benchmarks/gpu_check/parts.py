"""The parts of the acceptance run; ``parts.yaml`` says what each covers."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

from benchmarks.rank import on_ranks
from benchmarks.script import ROOT, read
from ptdbench.job import Job
from ptdbench.launch import local
from ptdbench.peaks import dense_peak
from ptdbench.records.run_record import typed
from ptdbench.report.remarks import reason

from .session import CHECKED_STEPS, Session, largest_difference, plausible, speed, speed_text, without_repeats

LAYOUTS = ("single", "ddp", "fsdp", "pdp")

#: Largest relative difference of a loss. A GPU adds up in another order from run to run, and every step amplifies that;
#: a wrong gradient is off by far more, as long as the losses move at all.
FP32, NARROW = 1e-4, 2e-2

#: Range of a healthy GPU's fastest product, as shares of the data sheet's peak: of tensor cores, and of other units,
#: which draw less power and keep their clock.
CEILING, CEILING_FP32 = (0.6, 0.9), (0.6, 1.0)

#: The MFU to reach in bf16 on one GPU.
GOALS = {"gpt_small": 0.5, "gpt_xl": 0.6}

#: How far throughput and peak memory of several runs in one process may differ from those of fresh processes.
SPEED_TOLERANCE, MEMORY_TOLERANCE = 0.03, 0.02

#: The shares of a step's time and memory that may be ``other``.
UNEXPLAINED = 0.05, 0.1

#: The profiler has missed allocations of a step whose peak is a smaller share of the run's.
SEEN = 0.8

#: A run that does not fit must say so within this time, the start of its processes included.
OOM_SECONDS = 120

#: Adam would hide gradients of the wrong scale.
SGD = ("optimizer=sgd", "optimizer.lr=0.01", f"train.steps={CHECKED_STEPS}")


def numbers(session: Session) -> None:
    """Compare losses in fp32."""
    modes = {layout: ("false", "layers", "whole")[: 3 if layout in ("single", "ddp") else 2] for layout in LAYOUTS}
    cells = [(layout, "fp32", mode) for layout in LAYOUTS for mode in modes[layout]]
    _losses(session, cells, FP32, *_small(session), *SGD)


def narrow(session: Session) -> None:
    """Compare losses in narrower arithmetic."""
    kinds = (("bf16", "false"), ("bf16", "layers"), ("fp16", "layers"))
    cells = [(layout, precision, mode) for precision, mode in kinds for layout in LAYOUTS]
    cells += [("single", "tf32", "false")] if session.device == "cuda" else []
    _losses(session, cells, NARROW, *_small(session), f"train.steps={CHECKED_STEPS}")


def images(session: Session, precision: str, tolerance: float) -> None:
    """Compare losses of ResNet."""
    cells = [(layout, precision, mode) for layout in ("single", "ddp", "fsdp") for mode in ("false", "layers")]
    if precision != "tf32" or session.device == "cuda":
        _losses(session, cells, tolerance, *session.sizes.images, *SGD, "optimizer.lr=0.05")


def _losses(session: Session, cells: Sequence[tuple[str, str, str]], tolerance: float, *common: str) -> None:
    """Compare the losses of layouts, precisions and ``compile`` with those of one rank in fp32."""
    alone = ("single", "fp32", "false")
    reference = session.reference("single fp32", "parallel=single", *common)
    for layout, precision, mode in (cell for cell in cells if cell != alone):
        words = (f"parallel={layout}", f"precision={precision}", f"compile={mode}", *common)
        session.follows(f"{layout} {precision} compile={mode}", reference, tolerance, *words)


def ceilings(session: Session) -> None:
    """Measure matrix products, and have the cluster check judge the device."""
    shapes = () if session.device == "cuda" else ("workload.shapes=[256]",)
    if not (record := session.well("matmul", "workload=matmul", *shapes)):
        return
    best: dict[str, float] = {}
    for product in record["matmul"]["ranks"][0]["products"]:
        best[product["dtype"]] = max(best.get(product["dtype"], 0.0), product["median"])
    for dtype, rate in best.items():
        peak, why = dense_peak(session.device_name, dtype)
        share = rate / peak if peak else None
        least, most = CEILING_FP32 if dtype == "fp32" else CEILING
        passed = share is None or least <= share <= most
        of_peak = f"{share:.1%} of the peak, {least:.0%} to {most:.0%} expected" if share else why
        text = f"{rate / 1e12:,.1f} TFLOP/s: {of_peak}"
        session.report(f"matmul {dtype}", passed, text, by="times", rate=rate, share=share)
    checked = session.run("check", "workload=check")
    verdict = checked.get("check", {}).get("verdict") if checked["status"] == "ok" else reason(typed(checked))
    session.report("check", checked["status"] == "ok", str(verdict), verdict=verdict)


def small(session: Session) -> None:
    """Find the fastest bf16 step of the small model."""
    batches = (16, 32, 64) if session.kind == "cuda" else (2,)
    modes = ("false", "layers", "whole")
    _fastest(session, session.sizes.model, [(batch, (f"compile={mode}",)) for batch in batches for mode in modes])


def large(session: Session, mode: str, precision: str = "bf16") -> None:
    """Find the fastest micro-batch of the large model."""
    words = (f"compile={mode}", f"precision={precision}")
    _fastest(session, session.sizes.large, [(batch, words) for batch in session.sizes.micro_batches])


def _fastest(session: Session, model: str, tries: Sequence[tuple[int, Sequence[str]]]) -> None:
    """Compare the best MFU of several runs with the goal; without a known peak it is enough that one runs."""
    records = []
    for batch, words in tries:
        typed = without_repeats("precision=bf16", *words)
        size = (f"train.global_batch={batch}", f"train.steps={session.sizes.steps}")
        name = f"{model} {batch} {' '.join(typed)}"
        records.append(session.measured(name, f"model={model}", "parallel=single", *size, *typed))
    ran = [record for record in records if record["status"] == "ok"]
    with_mfu = [record for record in ran if record["metrics"]["mfu"] is not None]
    if not ran:
        session.report("goal", False, "no size ran")
    elif with_mfu and model in GOALS:
        best = max(with_mfu, key=lambda record: record["metrics"]["mfu"])
        share, goal = best["metrics"]["mfu"], GOALS[model]
        verdict = "reached" if share >= goal else f"missed by {goal - share:.1%}"
        # Not a failure: a slower GPU is not a wrong one.
        text = f"best {speed_text(best)}; {goal:.0%} is the goal: {verdict}"
        session.report("goal", plausible(best), text, **speed(best))


def beside(session: Session, is_large: bool = False) -> None:
    """Compare the step with the same one of ``transformers``, alternating in one process."""
    model = session.sizes.large if is_large else session.sizes.model
    size = ("--batch=8", "--steps=20") if is_large else ("--batch=16", "--steps=50")
    tiny = ("--batch=2", "--sequence=32", "--steps=6", "--warmup=1")
    command = [sys.executable, "-m", "benchmarks", "model-speed", f"--model={model}"]
    command += [f"--device={session.device}", "--json", *(size if session.kind == "cuda" else tiny)]
    for mode in ("false", "layers", "whole"):
        name = f"{model} {mode} against transformers"
        done = subprocess.run([*command, "--modes", mode], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            session.report(name, False, done.stderr.strip().rpartition("\n")[2])
            continue
        figures = json.loads(done.stdout.strip().rpartition("\n")[2])[mode]
        text = f"our step takes {figures['ratio']:.3f} of theirs ({figures['ours']:.4f} s), required below 1"
        session.report(name, figures["ratio"] < 1, text, by="times", **figures)


def processes(session: Session) -> None:
    """Compare runs in one process with runs in fresh processes."""
    common = (*_small(session), "parallel=single", f"train.steps={session.sizes.steps}", "compile=layers")
    together = session.launched("together", "seed=1,2,3,4,5", *common)
    apart = [session.launched(f"apart-{seed}", f"seed={seed}", *common)[0] for seed in range(1, 6)]
    unwell = [record for record in (*together, *apart) if record["status"] != "ok"]
    if unwell or len(together) != len(apart):
        text = reason(typed(unwell[0])) if unwell else f"{len(together)} of {len(apart)} in one process"
        session.report("runs", False, text)
        return
    ours, fresh = ([record["metrics"] for record in records] for records in (together, apart))
    ratio = median(a["samples_per_second"] / b["samples_per_second"] for a, b in zip(ours, fresh, strict=True))
    memory = max(a["peak_memory_bytes"] / b["peak_memory_bytes"] for a, b in zip(ours, fresh, strict=True))
    text = f"{ratio:.3f} of fresh processes (median of {len(ours)}), within {SPEED_TOLERANCE:.0%}"
    session.report("throughput", abs(ratio - 1) <= SPEED_TOLERANCE, text, by="times", ratio=ratio)
    text = f"{memory:.3f} of fresh processes (largest), within {MEMORY_TOLERANCE:.0%}"
    session.report("peak memory", abs(memory - 1) <= MEMORY_TOLERANCE, text, by="memory", ratio=memory)


def endings(session: Session) -> None:
    """Resume a run, and start one that does not fit."""
    common = (*_small(session), "parallel=single", "optimizer=sgd", "optimizer.lr=0.01")
    whole = session.run("whole", *common, "train.steps=10")
    first = session.run("first-half", *common, "train.steps=5", "checkpoint.every_steps=5")
    resumed = session.run("second-half", *common, "train.steps=10", f"resume={first['directory']}")
    if ended := [record for record in (whole, first, resumed) if record["status"] != "ok"]:
        session.report("resume", False, reason(typed(ended[0])))
    else:
        off = largest_difference(resumed["losses"][-5:], whole["losses"][-5:])
        session.report(
            "resume", off <= FP32, f"steps 5 to 9 off by {off:.1e}, at most {FP32:.0e}", by="numbers", off=off
        )
    if session.device == "cuda":
        started = time.monotonic()
        # More than any GPU has, and no tensor of 2**31 elements, at which a kernel might fail first.
        words = ("parallel=single", "precision=bf16", "train.global_batch=192", "train.steps=3")
        status = session.run("out-of-memory", "model=gpt_xl", *words)["status"]
        seconds = time.monotonic() - started
        text = f"{status} after {seconds:.0f} s, at most {OOM_SECONDS}"
        session.report("out of memory", status == "oom" and seconds < OOM_SECONDS, text, seconds=seconds)


def explained(session: Session) -> None:
    """Limit the time in no phase and the memory of no kind."""
    for layout in LAYOUTS:
        steps = f"train.steps={session.sizes.steps}"
        record = session.well(layout, f"parallel={layout}", "profile.trace=true", steps, *_small(session))
        if not record:
            continue
        phases, memory = record["phases"] or {}, record.get("memory") or {}
        if not phases.get("steps") or not memory.get("ranks"):
            reasons = [str(part["reason"]) for part in (phases, memory) if part.get("reason")]
            session.report(layout, False, "; ".join(reasons) or "the record has no phases or no memory")
            continue
        share = max(phases["ranks"]["other"]) / phases["step_seconds"]
        session.report(f"{layout} time", share <= UNEXPLAINED[0], f"{share:.1%} of a step is other", share=share)
        amounts = {kind: max(of_ranks) for kind, of_ranks in memory["ranks"].items()}
        total = sum(amounts.values())
        share, of_run = amounts["other"] / total, total / record["metrics"]["peak_memory_bytes"]
        text = f"{share:.1%} of {total / 2**20:,.0f} MiB is other; the peak of this step is {of_run:.2f} of the run's"
        # A CPU's peak is its process's. On a GPU, the profiler may have missed allocations.
        is_seen = amounts["activations"] > 0 and (session.device == "cpu" or of_run >= SEEN)
        passed = share <= UNEXPLAINED[1] and is_seen
        session.report(f"{layout} memory", passed, text, share=share, of_run=of_run, **amounts)


def two_ranks(session: Session) -> None:
    """Share the device between two ranks over gloo."""
    common = (*_small(session), *SGD)
    reference = session.reference("single", "parallel=single", *common)
    words = ("backend=gloo", "cluster.ranks_per_node=2", *common)
    session.follows("ddp of 2", reference, FP32, "parallel=ddp", *words)
    others = {name: [f"parallel={name}"] for name in ("fsdp", "pdp", "tp")}
    for method in ("ulysses", "ring"):
        others[method] = ["parallel=ddp", "parallel.context=2", f"parallel.context_method={method}"]
    for name, layout in others.items():
        follows_over_gloo(session, f"{name} of 2", reference, *layout, *words)


def follows_over_gloo(session: Session, name: str, reference: Sequence[float], *overrides: str) -> None:
    """Compare a run over gloo; accept a refusal, as gloo lacks some operations on a GPU's memory."""
    record = session.run(name, *overrides)
    if record["status"] == "ok":
        session.compare(name, record, reference, FP32)
    else:  # any other error is a fault
        refused = "gloo" in str(record["error"]["message"]).lower()
        session.report(name, refused, f"{'not carried by gloo: ' * refused}{reason(typed(record))}")


def silent(session: Session) -> None:
    """Have torch's synchronization guard raise where the host would wait for the device."""
    words = {precision: [f"precision={precision}"] for precision in ("fp32", "bf16", "fp16")}
    for balance in ("loss", "forced"):  # in bf16: torch's grouped products in fp32 wait for the counts of each expert
        words[f"experts {balance}"] = ["model=moe_tiny", "precision=bf16", f"model.router.balance={balance}"]
    common = (f"device={session.device}", "parallel=single", "cluster.ranks_per_node=1", "train.clip_norm=1")
    for name, levers in words.items():
        typed = without_repeats(*_small(session), *levers)
        try:
            on_ranks(read(*common, *typed), _guarded_steps)
            session.report(name, True, "five steps without waiting for the device")
        except local.RankDied:
            session.report(name, False, "a step failed under the guard; its traceback is above")


def _guarded_steps(job: Job) -> None:
    """In a rank: a step that reads a number from the device, or copies from memory that is not pinned, raises."""
    import torch

    from ptdbench.workloads.train import assemble

    loop = assemble(job)
    for step in range(8):
        if step == 3 and job.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        loop.step()
    if job.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    loop.feed.close()


def _small(session: Session) -> tuple[str, ...]:
    return f"model={session.sizes.model}", f"train.global_batch={session.sizes.batch}"
