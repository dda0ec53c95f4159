"""Do public architectures train alike under every layout, or are they refused: the table of docs/zoo.md.

    make zoo                                                # each under fsdp, and under ddp, pdp or tp in turn
    make zoo ARGS="--all --resume"                          # all that was interrupted or wrong
    make zoo ARGS="--rows BERT CLIP --columns pdp"

Models have random weights, below 5 million. A cell is three steps of SGD in fp32 on two CPU ranks, whose losses and
norms of gradients must be those of one rank; without dropout and stochastic depth, and with batch norms over all
samples of a step. Good is a matrix without ``wrong``.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import hydra

from benchmarks.cells import SINGLE, Cell, Cells, Matrix
from benchmarks.parity_matrix import EXACT, numbers_of
from benchmarks.script import read
from ptdbench.launch import local
from ptdbench.parallel import proof


class Zoo(Matrix):
    """A matrix whose rows are models: a class or function, its arguments, and options of ptdbench."""

    def chosen(self, row: str, args: argparse.Namespace) -> Sequence[str]:
        """Return the columns of a row, by default those that it has in turn."""
        turn = self.turns[[*self.rows].index(row) % len(self.turns)]
        return args.columns or [name for name in self.columns if args.all or name == turn or name not in self.turns]

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

    local.warm_up(["transformers", "timm", "torchvision"])
    columns = ((), "some of them", ZOO.columns)
    with proof.in_one_process():
        return ZOO.fill(__doc__, execute, together=10, columns=columns, all=(False, "all columns of each row"))


def execute(cells: Cells) -> Iterator[tuple[Cell, str]]:
    """Run cells of few rows in the same ranks: gloo keeps the threads of all groups that a process had."""
    references = numbers_of({row: read(*ZOO.words(row, "single")) for row, _ in cells})
    for (row, column), numbers in numbers_of(cells).items():
        reference = references[row]
        verdict = next((text for text in (numbers, reference) if isinstance(text, str)), "")
        pairs = [] if verdict else zip(map(float, numbers), map(float, reference), strict=True)
        off = max((abs(number / expected - 1) for number, expected in pairs), default=0.0)
        yield (row, column), verdict or f"{'ok' if off <= EXACT else 'wrong: off by'} {off:.0e}"
