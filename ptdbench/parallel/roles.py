"""The roles of a model's modules, and whether ranks can share their work."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, get_args

from ptdbench.models.protocol import Kind, Model, Role, module_of
from ptdbench.parallel.dims import divisors
from ptdbench.problems import Problem, require, try_these


def roles_of(model: Model) -> dict[str, Role]:
    """Return the model's roles by full name; a user's own model may give only the kind of a role.

    Raises:
        ConfigError: A role is invalid, or names a module that the model does not have.
    """
    given: Mapping[str, Any] = model.roles()
    found = {name: role if isinstance(role, Role) else Role(role) for name, role in given.items()}
    modules = {name for name, _ in module_of(model).named_modules()}
    require(*(_unknown(name, role, modules) for name, role in found.items()))
    return found


def _unknown(name: str, role: Role, modules: Container[str]) -> Problem | None:
    option = f"roles()[{name!r}]"
    if role.kind not in get_args(Kind):
        return Problem(option, role.kind, "is not the role of a module", try_these([*get_args(Kind)]))
    if name not in modules:
        return Problem(option, role.kind, "is the role of a module that the model does not have")
    return None


def undivided(
    option: str,
    ranks: int,
    roles: Iterable[Role],
    others: int = 1,
    why: str = "which other ranks share too",
    whole: str = "the model",
) -> Iterator[Problem]:
    """Yield a problem if ``ranks`` do not divide the units that they share.

    Args:
        option: The degree.
        ranks: Its value.
        roles: The roles to check; those with 0 units are skipped.
        others: The product of other degrees that divide the same units, or the number of pieces per rank.
        why: What ``others`` are, in words that follow a comma.
        whole: What the units belong to.
    """
    shared = [role for role in roles if role.units]
    wrong = next((role for role in shared if role.units % (ranks * others)), None)
    if wrong is None:
        return
    smaller = [size for size in divisors(wrong.units) if 1 < size < ranks]
    fits = [size for size in smaller if all(role.units % (size * others) == 0 for role in shared)]
    rule = f"must divide the {wrong.units} {wrong.unit} of {whole}"
    if others > 1:
        rule = f"times {others} {rule}, {why}"
    yield Problem(option, ranks, rule, try_these(fits or [1]))
