"""Imports run downward only, those that only types need and those inside of functions too."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ptdbench"

#: The order of rooms, top first, as docs/developing.md has it; rooms of one line do not import each other.
ROOMS = """
    __main__ rank_imports
    commands from_python
    entry
    sweep
    run
    planning
    workloads
    training
    examples
    job
    report
    setup
    comparison
    checkpoints
    records
    parallel
    kernels
    data models optim
    prediction
    profiling
    measure
    launch
    local_part
    virtual
    files
    terminal units grouping peaks search_path nested
    problems
"""
LEVEL = {room: level for level, line in enumerate(ROOMS.splitlines()) for room in line.split()}

#: What users import, from where it is.
PUBLIC = "ptdbench"


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[dotted.removesuffix(".__init__")] = path
    return found


def imported(source: str, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            for name in node.names:
                one = f"{node.module}.{name.name}"
                yield one if one in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def room_of(module: str) -> str:
    return module.split(".")[1]


@cache
def edges() -> frozenset[tuple[str, str]]:
    known = modules()
    found = ((module, other) for module, path in known.items() for other in imported(path.read_text(), known))
    return frozenset((module, other) for module, other in found if other in known)


def test_every_room_has_its_place():
    rooms = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path.is_dir() and [*path.glob("*.py")])
    }
    assert rooms - {"__init__"} == set(LEVEL)


def test_imports_run_downward_only_and_in_no_circle():
    between = [(module, other) for module, other in edges() if module not in (PUBLIC, other)]
    upward = [
        f"{module} imports {other}"
        for module, other in between
        if room_of(module) != room_of(other) and LEVEL[room_of(module)] >= LEVEL[room_of(other)]
    ]
    assert sorted(upward) == []
    left = set(edges())
    while left:
        inner = {module for module, _ in left} & {other for _, other in left}
        fewer = {edge for edge in left if inner.issuperset(edge)}
        assert fewer != left, f"in a circle, or between two: {sorted(inner)}"
        left = fewer
