"""docs/patches.md lists each place that replaces something of torch's, and each private name of torch's in use."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "ptdbench"
PAGE = (ROOT / "docs" / "patches.md").read_text()

#: Attributes of a module or class whose assignment changes what it does.
REPLACED = ("__class__", "__init__", "forward", "run")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``; empty if it is something else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def of_torch(tree: ast.AST) -> set[str]:
    """The names that a file has from torch."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(one.asname or one.name).partition(".")[0] for one in node.names if one.name.startswith("torch")}
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            names |= {one.asname or one.name for one in node.names}
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            parts = chain(node.value)  # ``steps: Any = self._torch.autograd.profiler.KinetoStepTracker``
            names |= {*chain(node.target)[:1]} if {"torch", "_torch"} & {*parts[:2]} else set()
    return names


def replacements(tree: ast.AST) -> Iterator[str]:
    """The attributes that a file replaces, by their last name, and the libraries whose operators it overrides."""
    torchs = of_torch(tree)
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    for names in filter(None, map(chain, targets)):
        if len(names) > 1 and (names[0] in torchs or (names[-1] in REPLACED and names[0] != "self")):
            yield names[-1]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if chain(call.func)[-1:] == ["Library"] and ast.literal_eval(call.args[1]) == "IMPL":
            yield ast.literal_eval(call.args[0])  # the library whose operators are overridden


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names of torch's that a file uses."""
    torchs = of_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            yield from (name for one in node.names for name in (*str(node.module).split("."), one.name))
        elif isinstance(node, ast.Attribute) and (names := chain(node))[:1] and names[0] in torchs:
            yield from names[1:]


def test_the_page_lists_each_place():
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree, where = ast.parse(path.read_text()), path.relative_to(PACKAGE).as_posix()
        lines = [line for line in PAGE.splitlines() if f"`{where}`" in line]
        missing += [f"{where}: {name}" for name in replacements(tree) if not any(name in line for line in lines)]
        missing += [f"{where}: {name}" for name in private_names(tree) if is_private(name) and f"`{name}`" not in PAGE]
    assert sorted(set(missing)) == []


def test_what_the_page_names_is_there():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and ".py`" in line]
    files = {word.strip("`") for row in rows for word in row.split("|")[1].strip().split(", ")}
    assert [name for name in files if not Path(PACKAGE, name).exists()] == []
