"""Command lines that go on with what an earlier one began: ``resume=<run>`` and ``sweep.resume=<sweep>``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ptdbench.problems import ConfigError, Problem
from ptdbench.records import store

RUN, SWEEP = "resume", "sweep.resume"

#: Where a run is carried out is no part of what it is.
_PLACE = ("cluster=", "cluster.", "hydra.", "hydra/")


@dataclass(frozen=True)
class Line:
    """A command line with what it takes over from an earlier one.

    Attributes:
        overrides: All overrides.
        goes_on: The directory of the run or sweep that goes on in its place; ``None`` for a new one.
    """

    overrides: list[str]
    goes_on: Path | None


def read(typed: Sequence[str], multirun: bool) -> Line:
    """What a command line stands for.

    Raises:
        ConfigError: There is nothing to go on with.
    """
    given = dict(override.partition("=")[::2] for override in typed)
    others = [override for override in typed if override.partition("=")[0] not in (RUN, SWEEP)]
    if (sweep := _path(given.get(SWEEP))) is not None:
        return _sweep(sweep, others)
    if (run := _path(given.get(RUN))) is not None:
        return _run(run, others, multirun)
    return Line(list(typed), None)


def _run(directory: Path, others: list[str], multirun: bool) -> Line:
    """Go on in the run's own directory; with other options it becomes a run of its own that begins there."""
    earlier = [override for override in _earlier(directory, RUN) if not override.startswith((*_PLACE, f"{RUN}="))]
    place = [override for override in others if override.startswith(_PLACE)]
    if len(others) > len(place) or multirun:
        names = {override.partition("=")[0] for override in others}
        kept = [override for override in earlier if override.partition("=")[0] not in names]
        return Line([*kept, *others, f"{RUN}='{directory.resolve()}'"], None)
    _refuse_complete(directory)
    return Line([*earlier, *place, f"hydra.run.dir='{directory}'"], directory)


def _sweep(directory: Path, others: list[str]) -> Line:
    """The same sweep in the same directory: runs that are ok will be skipped."""
    path = directory / "multirun.yaml"
    if not path.exists():
        rule = "there is no sweep (no multirun.yaml)"
        raise ConfigError([Problem(SWEEP, directory, rule, "give the directory of a sweep below outputs")])
    if wrong := [override for override in others if not override.startswith("hydra.")]:
        rule = f"goes on with the sweep as it was, and {' '.join(wrong)} would change it"
        raise ConfigError([Problem(SWEEP, directory, rule, "leave it away, or start another sweep")])
    task = _words(path, SWEEP, directory, lambda saved: saved["hydra"]["overrides"]["task"])
    return Line([*task, *others, "hydra.mode=MULTIRUN", f"hydra.sweep.dir='{directory}'"], directory)


def _earlier(directory: Path, option: str) -> list[str]:
    """The overrides of the run in a directory, as Hydra has noted them down."""
    path = directory / ".hydra" / "overrides.yaml"
    if not path.exists():
        rule = "there is no run (no .hydra/overrides.yaml)"
        raise ConfigError([Problem(option, directory, rule, "give the directory of a run below outputs")])
    return _words(path, option, directory, lambda saved: saved)


def _words(path: Path, option: str, directory: Path, find: Callable[[Any], Any]) -> list[str]:
    """The overrides that ``find`` picks out of a file of Hydra's, as they were typed."""
    found, reason = None, "there are no overrides in it"
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # the parsers of YAML raise more kinds than they say
        saved, reason = None, " ".join(str(error).split())[:200] or type(error).__name__
    with suppress(LookupError, TypeError):
        found = find(saved)
    if isinstance(found, list) and all(isinstance(word, str) for word in found):
        return found
    rule = f"{path.relative_to(directory)} is damaged ({reason})"
    raise ConfigError([Problem(option, directory, rule, "type the overrides again, in a new directory")])


def _refuse_complete(directory: Path) -> None:
    record: Mapping[str, Any] = {}
    with suppress(FileNotFoundError, store.Damaged):  # nothing says that it is
        record = store.load_record(directory)
    done, wanted = len(record.get("losses") or []), ((record.get("config") or {}).get("train") or {}).get("steps")
    if record.get("status") == "ok" and done == wanted:
        rule = f"is complete, with {done} of {wanted} steps"
        raise ConfigError([Problem(RUN, directory, rule, f"would do: train.steps={2 * done}, to train on from there")])


def _path(value: str | None) -> Path | None:
    """The path that was typed, in quotes or not."""
    if value in (None, "", "null"):
        return None
    assert value is not None
    return Path(value.strip("'\""))
