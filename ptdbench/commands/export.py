"""``ptdbench export outputs/<sweep> --best --to fsdp2 > layout.py``: the fastest layout, for another program."""

import argparse
import re
import sys
from pathlib import Path

from ptdbench.problems import Problem, require
from ptdbench.terminal import echo, plural

HELP = "the fastest layout as torch's calls, accelerate's configuration or torchtitan's options"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``export``."""
    parser.add_argument("directory", type=Path, help="of a run or of a sweep")
    parser.add_argument("--best", action="store_true", help="the fastest run of a sweep")
    # Without a YAML parser: importing one would delay every command.
    programs = re.findall(r"^(\w+):", (Path(__file__).parents[1] / "report" / "export.yaml").read_text(), re.MULTILINE)
    parser.add_argument("--to", choices=programs, required=True, help="the program; fsdp2: FSDP2 or DDP in PyTorch")


def main(arguments: argparse.Namespace) -> int:
    """Print the text, and remarks on standard error."""
    from ptdbench.comparison.ranking import of_sweeps
    from ptdbench.records.load import read
    from ptdbench.report import columns, export

    folder = arguments.directory
    trained = [run for run in read(folder) if run.model and not run.kind]
    rule = "has no run that trained and was ok; see its table with ptdbench status"
    ok = [run for run in trained if run.throughput]
    require(None if ok else Problem("export", folder, rule))
    if len(ok) > 1 and not arguments.best:
        require(Problem("export", folder, f"has {plural(len(ok), 'run')}", "add --best, or give the directory of one"))
    sections = columns.sections(of_sweeps(trained))
    if len(sections) > 1:
        names = ", ".join(section.name for section in sections)
        require(Problem("export", folder, f"has runs that do not compare: {names}", "give the directory of one run"))
    text, remarks = export.export(sections[0].rows[0].run, arguments.to)
    echo(text.removesuffix("\n"))
    for remark in (sections[0].answer, *remarks):
        echo(remark, sys.stderr)
    return 0
