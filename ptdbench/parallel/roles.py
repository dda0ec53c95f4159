"""The roles of a model's modules."""

from collections.abc import Mapping
from typing import Any, get_args

from ptdbench.models.protocol import Kind, Model, Role, module_of
from ptdbench.problems import Problem, require, try_these


def roles_of(model: Model) -> dict[str, Role]:
    """Return the model's roles by full name; a user's own model may give only the kind of a role.

    Raises:
        ConfigError: A role is invalid, or names a module that the model does not have.
    """
    given: Mapping[str, Any] = model.roles()
    roles = {name: role if isinstance(role, Role) else Role(role) for name, role in given.items()}
    modules, kinds = {name for name, _ in module_of(model).named_modules()}, get_args(Kind)
    problems = []
    for name, role in roles.items():
        if role.kind not in kinds:
            problems.append(Problem(f"roles()[{name!r}]", role.kind, "is not a role", try_these(kinds)))
        elif name not in modules:
            problems.append(Problem(f"roles()[{name!r}]", role.kind, "the model has no module of this name"))
    require(*problems)
    return roles
