"""Run a benchmark of ptdbench itself.

    python -m benchmarks TARGET [SUBJECT] [OPTIONS]

Without a subject, the default subjects of the target run, or, with options, the first of them. Each is a module whose
docstring says what it measures and requires. ``KEEP=1`` in the environment stores its figures in
``results.json`` and rewrites the README.
"""

import os
import subprocess
import sys
from importlib import import_module

from benchmarks.script import ROOT

#: The modules of each target by subject, with the subject where a module has several, and how many run by default.
TARGETS: dict[str, tuple[int, dict[str, str]]] = {
    "overhead": (2, {"steps": "overhead", "checkpoints": "checkpoint_cost", "phases": "phases_truth"}),
    "parity-matrix": (1, {"layouts": "parity_matrix layouts", "experts": "parity_matrix experts"}),
    "virtual-truth": (
        2,
        {name: f"virtual_truth {name}" for name in ("measured", "published", "layouts")} | {"kernels": "kernels"},
    ),
    **{
        target: (1, {"": target.replace("-", "_")})
        for target in (
            "launch-time", "model-speed", "train-for-real", "plan-truth", "memory-truth", "ranks-truth", "time-truth",
            "any-program", "zoo",
        )
    },
    "attack": (1, {"": "attack.attack"}),
}  # fmt: skip


def main(target: str = "", *words: str) -> int:
    """Run subjects of a target one after the other; return the exit status of the first that fails."""
    if target not in TARGETS:
        print(f"{__doc__}\n" + "\n".join(f"{name:16}{' '.join(programs)}" for name, (_, programs) in TARGETS.items()))
        return int(target not in ("", "-h", "--help"))
    count, programs = TARGETS[target]
    subjects = [*programs][: 1 if words else count]
    if words and words[0] in programs:
        subjects, words = [words[0]], words[1:]
    if len(subjects) > 1:
        commands = ([sys.executable, "-m", "benchmarks", target, subject] for subject in subjects)
        statuses = [subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands]
        return next(filter(None, statuses), 0)
    module, *subject = programs[subjects[0]].split()
    os.chdir(ROOT)
    sys.argv = [f"make {target}", *words]  # what --help shows, and the options
    status: int = import_module(f"benchmarks.{module}").main(*subject)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
