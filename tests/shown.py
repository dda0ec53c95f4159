"""The commands that the README, the pages of docs/ and the files of conf/ show."""

import re
from pathlib import Path

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!_]*/*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def whole(text: str) -> str:
    """The text with commands that are continued on the next line, after a backslash, in one line."""
    return re.sub(r" +\\\n\s*", " ", text).replace("\\\n", "")


def commands(text: str) -> list[str]:
    """What follows ``train.py`` in the command lines that a text shows, without the remarks beside them.

    Left out are lines with a placeholder, such as ``resume=outputs/<run>`` and ``[-m]``, and those that show a refusal.
    """
    starter = r"^#?\s*(?:\$ )?(?:(?:(?:srun|mpirun) .*)?python|torchrun .*) train\.py(.*)$"
    found = [re.split(r"\s{2,}|\s#", line)[0].strip() for line in re.findall(starter, whole(text), re.MULTILINE)]
    refused = {command for command, _ in refusals(text)}
    return [command for command in found if not re.search(r"<|\[-|\[[A-Z]", command) and command not in refused]


def typed(text: str) -> list[str]:
    """The lines of a text that are typed into a shell and start something of this project, without remarks and prompts.

    Left out are those that show a refusal, and those of ``make``.
    """
    starter = (
        r"^(?: {4}|\$ )?((?:python|torchrun|srun|mpirun|ptdbench|tensorboard)\b.*(?:train\.py|ptdbench|logdir).*)$"
    )
    found = [re.split(r"\s{2,}|\s#", line)[0].strip() for line in re.findall(starter, whole(text), re.MULTILINE)]
    refused = {f"python train.py {command}" for command, _ in refusals(text)}
    return [line for line in found if line not in refused and not re.match(r"ptdbench (itself|measures)\b", line)]


def refusals(text: str) -> list[tuple[str, list[str]]]:
    """Commands of a console session that are refused, with the lines that say so."""
    sessions = re.findall(r"^ *\$ python train\.py (.*)\n((?: *[\w.]+=\S+: .*\n)+)", whole(text), re.MULTILINE)
    return [(command, [line.strip() for line in lines.splitlines()]) for command, lines in sessions]


def links(page: Path) -> list[str]:
    """Where the links and images of a page lead: paths relative to it, with anchors."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]
