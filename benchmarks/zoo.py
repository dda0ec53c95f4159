"""Do public architectures train alike under every layout, or are they refused: the table of docs/zoo.md.

    make zoo                                                # each under fsdp, and under ddp, pdp or tp in turn
    make zoo ARGS="--all --resume"                          # all that was interrupted or wrong
    make zoo ARGS="--rows BERT CLIP --columns pdp"

Models have random weights, below 5 million. A cell is three steps of SGD in fp32 on two CPU ranks, whose losses and
norms of gradients must be those of one rank; without dropout and stochastic depth, and with batch norms over all
samples of a step. Good is a matrix without ``wrong``.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
import torch

from benchmarks.cells import RESUME, SINGLE, Matrix, refused
from benchmarks.parity_matrix import EXACT, Numbers, steps
from benchmarks.rank import job_of, on_ranks
from benchmarks.script import read
from ptdbench.job import Job
from ptdbench.launch import local
from ptdbench.parallel import proof
from ptdbench.problems import ConfigError, first_line
from ptdbench.setup.config import Config


class Zoo(Matrix):
    """A matrix whose rows are models: a class or function, its arguments, and options of ptdbench."""

    def chosen(self, row: str, *, every: bool) -> list[str]:
        """Return the columns of a row, or those that it has by default."""
        turn = self.turns[[*self.rows].index(row) % len(self.turns)]
        return [column for column in self.columns if every or column == turn or column not in self.turns]

    def words(self, row: str, column: str) -> list[str]:
        """Return the options of a cell; the column ``single`` is for one rank."""
        ranks, layout = (self.rows[row][0], self.columns[column]) if column in self.columns else SINGLE
        target, *words = self.rows[row][1].split()
        options = [word for word in words if word.startswith(("data.", "optimizer.", "parallel.", "train."))]
        arguments = dict(word.split("=", 1) for word in words if word not in options)
        prefix, data = "+model.", ["data=synthetic_images", "data.image_size=32", "data.classes=10"]
        if target.startswith("transformers."):
            kind = hydra.utils.get_object(target).config_class
            arguments = {"_target_": f"transformers.{kind.__name__}"} | self._common(kind) | arguments
            prefix = "+model.config."
            data = data if "ForImage" in target else ["data=synthetic_inputs", "data.sequence_length=16"]
        else:
            arguments.setdefault("num_classes", "10")
        if "parallel.sync_batchnorm=true" in options and column not in ("ddp", "fsdp"):
            options.remove("parallel.sync_batchnorm=true")
            options += ["parallel.schedule=gpipe", "parallel.microbatches=1"] * (column == "pdp")
        made = [f"{prefix}{name}={value}" for name, value in arguments.items()]
        where = [layout, f"cluster.ranks_per_node={ranks}", f"model._target_={target}"]
        return [*self.common.split(), *where, *data, *made, *options]

    def _common(self, kind: Any) -> dict[str, Any]:
        """Return the sizes that a configuration of transformers has, and 0 for each dropout."""
        default = kind().to_dict()
        names = {kind.attribute_map.get(name, name): size for name, size in self.sizes.items()}
        sizes = {name: size for name, size in names.items() if name in default and not isinstance(default[name], list)}
        return sizes | {name: 0.0 for name, value in default.items() if "drop" in name and isinstance(value, float)}


ZOO = Zoo.load("zoo")


def main() -> int:
    """Fill the matrix; 1 if a cell is wrong."""
    import timm  # noqa: F401 - or rows would be refused for want of it

    some = ((), "some of them", ZOO.columns)
    args = ZOO.options(__doc__, columns=some, all=(False, "all columns of each row"), resume=RESUME)
    before = ZOO.stored() if args.resume else {}
    chosen = [(row, column) for row in args.rows for column in args.columns or ZOO.chosen(row, every=args.all)]
    left = [cell for cell in chosen if before.get(cell[0], {}).get(cell[1], "wrong").startswith("wrong")]
    local.warm_up(["transformers", "timm", "torchvision"])
    for first in range(0, len(args.rows), 10):  # gloo keeps the threads of all groups that a process had
        fill([cell for cell in left if cell[0] in args.rows[first : first + 10]])
    return int(any(ZOO.stored()[row][column].startswith("wrong") for row, column in chosen))


def fill(cells: Sequence[tuple[str, str]]) -> None:
    """Fill cells, each a row and a column, in the same ranks until one dies."""
    two = read("parallel=ddp", "device=cpu", "cluster.ranks_per_node=2")
    alone = {row: read(*ZOO.words(row, "single")) for row, _ in cells}
    references = on_ranks(read("parallel=single", "device=cpu"), _numbers, alone) if alone else {}
    left = {cell: read(*ZOO.words(*cell)) for cell in cells}
    with TemporaryDirectory() as directory:
        path = Path(directory, "cell")
        while left:
            try:
                return on_ranks(two, _fill, left, references, path)
            except local.RankDied:
                row, column, verdict = json.loads(path.read_text())
                ZOO.report(row, column, verdict)
                left = dict([*left.items()][[*left].index((row, column)) + 1 :])


def _numbers(job: Job, alone: Mapping[str, Config]) -> dict[str, Numbers | str]:
    """In the only rank: return the numbers of each row, or the verdict on it."""
    torch.set_num_threads(1)
    return {row: _tried(config, job) for row, config in alone.items()}


@proof.in_one_process()
def _fill(job: Job, left: Mapping[tuple[str, str], Config], references: Mapping[str, Any], path: Path) -> None:
    """In a rank: report each cell; the file names the one in progress, which may kill the ranks."""
    torch.set_num_threads(1)
    for (row, column), config in left.items():
        if job.world.is_first:
            path.write_text(json.dumps([row, column, "wrong: a rank has died"]))
        numbers, reference = _tried(config, job), references[row]
        if isinstance(numbers, str) and numbers.startswith("wrong"):
            path.write_text(json.dumps([row, column, numbers]))
            raise SystemExit(1)  # the other rank may wait for this one
        verdict = next((text for text in (numbers, reference) if isinstance(text, str)), "")
        pairs = [] if verdict else zip(map(float, numbers), reference, strict=True)
        off = max((abs(number / expected - 1) for number, expected in pairs), default=0.0)
        if job.world.is_first:
            ZOO.report(row, column, verdict or f"{'ok' if off <= EXACT else 'wrong: off by'} {off:.0e}")


def _tried(config: Config, job: Job) -> Numbers | str:
    """Return the numbers of a run in this rank, or the verdict on its cell."""
    try:
        return steps(job_of(config, job))
    except ConfigError as error:
        return refused(error)
    except Exception as error:  # third-party code may raise anything
        traceback.print_exc()
        return f"wrong: {type(error).__name__}: {first_line(error)}"
