"""The object that a config group's choice describes: ``_target_`` called with the options beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from ptdbench.problems import ConfigError, Problem, said
from ptdbench.setup import signature
from ptdbench.setup.config import Call, Config

T = TypeVar("T")

# Hydra logs what it cannot import; the problem that is raised here says it better, and once.
logging.getLogger("hydra.utils").disabled = True

# Importing torchao, as transformers does, makes torch warn twice in each process of what only torchao can change.
logging.getLogger("torch.utils._pytree").addFilter(lambda told: "register_constant() on Enum" not in told.getMessage())


def build(config: Config, group: str) -> Any:
    """The object that a group's choice describes."""
    call = config.call(group)
    check(call, group)
    return guarded(lambda: instantiate({"_target_": call.target, "_convert_": "all", **call.options}), group)


def bound(config: Config, group: str, *given: str) -> Callable[..., Any]:
    """The function that a group's choice describes, with its options bound."""
    call = config.call(group)
    target = check(call, group, *given)
    return partial(target, **call.options)


def check(call: Call, group: str, *given: str) -> Callable[..., Any]:
    """Find what a group's choice calls, and hold its options against the signature."""
    try:
        target = get_object(call.target)
    except Exception as error:  # whatever an import may raise
        rule = f"cannot be imported: {said(error.__cause__ or error)}".partition("\n")[0]
        remedy = "it is looked for in the current directory, in PYTHONPATH and among what is installed"
        raise ConfigError([Problem(f"{group}._target_", call.target, rule, remedy)]) from None
    if not callable(target):
        raise ConfigError([Problem(f"{group}._target_", call.target, "must be a class or a function")])
    problems = signature.problems(target, call.options, given)
    if problems:
        raise ConfigError(problems).under(group)
    return target


def guarded(make_it: Callable[[], T], group: str) -> T:
    """Make it, and say of whatever is raised which group it came from."""
    try:
        return make_it()
    except Exception as error:  # a constructor of somebody else's may raise anything
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        if isinstance(cause, ConfigError):
            raise cause.under(group) from None
        raise ConfigError([Problem(group, "(its options)", f"cannot be built: {said(cause)}")]) from error
