"""The workload ``train``: timed optimizer steps, with evaluations and checkpoints between them."""

import gc
import random
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

import torch
from msgspec import structs

from ptdbench.data.feed import Feed
from ptdbench.data.protocol import require_same_on_all_ranks
from ptdbench.job import Job, Outcome, Results
from ptdbench.launch import rendezvous
from ptdbench.launch.collect import barrier, gather, most
from ptdbench.launch.stop_signal import StopSignal
from ptdbench.measure import memory
from ptdbench.optim.schedules import Constant
from ptdbench.parallel import replicas
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.precision import AgreedGradScaler
from ptdbench.records.ownership import ProgressFile
from ptdbench.records.schema import Metrics, Remarks
from ptdbench.records.store import Damaged
from ptdbench.setup.training_spec import prepare_data
from ptdbench.training import metrics, profile
from ptdbench.training.checkpointing import Checkpointing
from ptdbench.training.energy import EnergyMeter
from ptdbench.training.evaluation import Evaluator
from ptdbench.training.loop import StepLoop, Update, collect_garbage
from ptdbench.training.metrics import first_nonfinite_loss
from ptdbench.training.recorder import Recorder
from ptdbench.virtual.watch import settle

#: Number of steps after which ``train.max_minutes`` is applied: the first compiles, the second allocates.
PROBE_STEPS = 3


@dataclass(frozen=True)
class Train:
    """Train for ``train.steps`` steps, or fewer if ``train.max_minutes`` would be exceeded."""

    trains = True

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Accept any ranks: the strategy checks its own requirements."""

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part."""
        job.display.phase("building")
        training = _Training(job)
        outcome = training.outcome()
        if not (outcome.stopped or outcome.error):
            with memory.no_collection():  # a collection would copy the pages shared with the fork server
                _explain(job, training.loop, outcome)
        return outcome


class _Training:
    """The components of a rank's training, set up to its first step, and their interplay."""

    def __init__(self, job: Job) -> None:
        self._job = job
        spec = job.training
        self._remarks = Remarks(pipeline=spec.imbalance(), kernels=spec.stand_ins())
        if self._remarks.pipeline and job.world.is_first:
            job.note(Results(remarks=self._remarks))  # also if the run fails, by lack of memory for example
        self.loop = loop = assemble(job)
        self._evaluator = Evaluator(job, loop)
        self._recorder = Recorder(job, loop)
        self._checkpointing = Checkpointing(job, loop, self._evaluator, self._recorder)
        self._meter = EnergyMeter(job, loop)
        self._checkpointing.resume()
        if job.spec.config.checkpoint.every_steps or self._checkpointing.resumed:
            job.display.phase("rehearsing the first step")
            loop.rehearse()
        job.watch.lap("build")

    def outcome(self) -> Outcome:
        """Run all steps and return the outcome, with the error if the run diverged; called in all ranks."""
        with self._recorder:
            return self._outcome(self._advance())

    def _advance(self) -> str | None:
        """Run all steps, with evaluations and saves between them; return the name of the stop signal, if any."""
        loop, evaluator = self.loop, self._evaluator
        checkpointing, recorder = self._checkpointing, self._recorder
        compared = max(1, self._job.spec.config.train.warmup_steps - 1)  # the next step, with cold caches, is not timed
        stopped = None
        advancing = steps(self._job, loop, at_end=self._meter.stop)
        with StopSignal() as stop_signal, closing(advancing) as advance:
            if loop.done and evaluator.due():  # a checkpoint is written before the evaluation of its step
                evaluator(stop_signal.meanwhile())
            for _ in advance:
                if loop.taken == compared:
                    self._compare_replicas()
                if evaluator.due() or recorder.due or checkpointing.due:
                    with self._meter.paused():
                        if checkpointing.due:  # first: an evaluation may take longer than the run has left
                            checkpointing.save()
                        if evaluated := evaluator.due():
                            evaluator(stop_signal.meanwhile())
                        if evaluated or recorder.due:
                            recorder.show(evaluator.done)
                if stopped := stop_signal.received(loop.taken):
                    self._meter.stop()
                    break
            if not stopped:
                self._compare_replicas()
                if evaluator.due(at_end=True):
                    checkpointing.save()
                    evaluator(stop_signal.meanwhile())
                    stopped = stop_signal.received(loop.taken)
            checkpointing.finish()
        return stopped

    def _compare_replicas(self) -> None:
        """Fail if ranks hold different copies of a weight; virtual GPUs have no values."""
        job, mesh = self._job, self.loop.mesh
        if job.world.size == 1 or job.spec.virtual:
            return
        # Each rank of a tensor-parallel group averages its gradients in another group, where NCCL, from three ranks on,
        # may sum in another order, which rounds differently.
        ranks = mesh["tp"] if job.device.type == "cuda" and mesh.dp_cp.size() > 2 else None
        first = {second: first for first, second in job.training.tied}
        weights = ((first.get(name, name), weight) for name, weight in self.loop.engine.module.named_parameters())
        replicas.require_equal(weights, ranks and ranks.get_local_rank())

    def _outcome(self, stopped: str | None) -> Outcome:
        job, done, options = self._job, self.loop.done, self._job.spec.config.train
        self._remark(stopped)
        self._recorder.finish()
        outcome = Outcome(
            **structs.asdict(self._recorder.figures()),
            saved=self._checkpointing.saved,
            logs=self._recorder.logs,
        )
        outcome.remarks, outcome.evaluations = self._remarks, self._evaluator.done
        measured = outcome.metrics or Metrics()
        job.display.conclude(measured.tokens_per_second or measured.samples_per_second)
        # Only rank 0 has the series, which decide whether all ranks go on to the profiling pass.
        wrong = gather(first_nonfinite_loss(self._recorder.path) if job.world.is_first else None)[0]
        if wrong is not None:
            outcome.error = FloatingPointError(f"the loss of step {wrong + 1} is NaN or infinite")
        outcome.experts = metrics.experts(job, self.loop)
        if stopped:
            outcome.stopped = f"{stopped} after step {done} of {options.steps}"
        outcome.hardware = self._meter.finish()
        return outcome

    def _remark(self, stopped: str | None) -> None:
        """Note why there are fewer steps than requested, and problems of checkpoints."""
        job, options, remarks = self._job, self._job.spec.config.train, self._remarks
        if self.loop.done < options.steps and not stopped:
            limit = f"train.max_minutes={options.max_minutes}"
            remarks.cut_short = f"{self.loop.done} of {options.steps} steps: more would exceed {limit}"
            if not isinstance(job.training.schedule, Constant):
                remarks.cut_short += f"; the learning rate schedule spans all {options.steps}"
        remarks.resumed = self._checkpointing.resumed
        remarks.checkpoints = [*self._checkpointing.problems, *self._recorder.warnings] or None


def _explain(job: Job, loop: StepLoop, outcome: Outcome) -> None:
    """Add the phases and the memory of a step to the outcome.

    The run has already succeeded, and its record says so whatever happens in this pass, even a stop signal.
    """
    machine = job.spec.virtual
    if machine:
        outcome.virtual = profile.virtual_account(job, loop)
    if job.spec.config.profile.steps:
        outcome.profiles = not machine  # whose times mean nothing
        _conclude(job, outcome)
        if outcome.profiles:
            outcome.phases = profile.phases(job, loop, outcome.metrics)
            outcome.profiles = False
            _conclude(job, outcome)
        outcome.memory = profile.memory_by_purpose(job, loop)


def _conclude(job: Job, outcome: Outcome) -> None:
    """Write the result so far, and close the logs unless phases follow; if that fails, it is tried again later."""
    if job.world.is_first:
        with job.watchdog.paused(), suppress(OSError, Damaged):  # the other ranks go on
            job.conclude(outcome)
            outcome.logs = outcome.logs if outcome.profiles else ()


def assemble(job: Job) -> StepLoop:
    """Set up data, laid-out model and optimizer; raise ConfigError if data are unusable or differ between ranks."""
    training = job.training
    with job.watchdog.paused():  # preparing data may read and write a lot
        if job.world.local_rank == 0:
            prepare_data(training.config, training.data)
        barrier()
        # Finds the work done, and lists the data before worker processes are forked.
        prepare_data(training.config, training.data)
        require_same_on_all_ranks(training.data)
    dims = training.layout.dims
    mesh = Mesh(dims, job.spec.device_type)
    engine = training.engine(mesh, job.device)
    # For dropout: only ranks that share each product, which are neighbors in the mesh, draw the same numbers. Seed
    # after laying the model out, which may draw.
    place = job.world.rank // dims.ways("products")
    torch.manual_seed(random.Random(f"{job.spec.config.general.seed} {place}").getrandbits(63))
    rendezvous.be_patient(rendezvous.patience_for(job.spec.config.general.timeout_minutes))
    is_ours = "loss scaling" in training.strategy.stand_ins(dims, scales=training.scales)
    is_plain = training.config.general.kernels == "torch" and not is_ours
    update = Update(
        engine,
        engine.optimizer(training.optimizer),
        training.schedule,
        job.spec.config.train,
        job.device,
        scale=training.scales,
        scaler=torch.amp.GradScaler if is_plain else AgreedGradScaler,
    )
    replica = mesh.dp.get_local_rank()
    feed = Feed(training.data, partial(training.layout.rows, replica=replica), job.device)
    return StepLoop(engine, update, feed, job.device, mesh)


def steps(job: Job, loop: StepLoop, at_end: Callable[[], None] = lambda: None) -> Generator[int, None, None]:
    """Run the steps with watchdog and progress updates between them; yield the number of steps done.

    The garbage collector is off until the iterator ends or is closed. ``at_end`` is called after the last step, before
    the feed is closed.
    """
    wanted = job.spec.config.train.steps
    report = reporter(job, loop, wanted)
    collect_garbage()
    memory.reset_peak(job.device)  # exclude what was garbage
    gc.disable()
    try:
        with job.watchdog.following(lambda: loop.finished):
            while loop.done < wanted:
                loop.step()
                if loop.taken == 1:
                    if job.device.type == "cuda":
                        torch.cuda.synchronize(job.device)
                    job.watch.lap("first_step")
                if job.spec.virtual:
                    settle()
                if loop.taken == PROBE_STEPS:
                    wanted = _affordable(job, loop)
                job.watchdog.beat(loop.done)
                report(wanted)
                yield loop.done
        at_end()
    finally:
        gc.enable()
        gc.unfreeze()
        loop.feed.close()
        job.display.phase("finishing")


def reporter(job: Job, loop: StepLoop, steps: int) -> Callable[[int], None]:
    """Begin to report progress over ``steps`` steps to the display and the status file.

    Return a function to call between two steps with the total number, which may change.
    """
    display, shows, per_sample = job.display, job.world.is_first, job.training.data.tokens_per_sample
    unit = "tokens" if per_sample else "samples"
    batch = None if job.spec.virtual else job.training.layout.global_batch  # virtual GPUs have no rate
    name = "first step, compiling" if job.spec.config.general.compile else "first step"
    display.devices = job.world.size, "GPU" if job.device.type == "cuda" else "rank"
    display.begin_steps(loop.done, steps, unit, batch and batch * (per_sample or 1), name)
    in_job = shows and not job.world.started_by.has_parent
    file = ProgressFile(job.directory, unit) if in_job else None

    def report(steps: int) -> None:
        now, done = time.perf_counter(), loop.done
        display.step(done, now)
        if shows and (done == steps or display.due(now)):
            display.total_steps = steps
            rate = display.show(now)
            if file:
                file.write(done, steps, rate, now)

    return report


def _affordable(job: Job, loop: StepLoop) -> int:
    """Return the steps that fit into ``train.max_minutes`` at the pace of the fastest undrained step, on all ranks."""
    options = job.spec.config.train
    if options.max_minutes is None:
        return options.steps
    (seconds,) = most(min(loop.clock.seconds()))
    affordable = loop.first_step + int(options.max_minutes * 60 / seconds)
    return min(options.steps, max(affordable, loop.done))
