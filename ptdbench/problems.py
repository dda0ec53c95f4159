"""Problems of a configuration, and how a person can fix them.

This is the lowest room of the house: it imports nothing of the package, and anything may raise a
:class:`ConfigError`. Problems are collected and shown together, because a person who fixes one at a time
starts the program once for each. By hand: pydantic's errors name fields of a model and one rule each, these the option
as it is typed, its value, the rule with the figures it depends on, and what to type instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Problem:
    """One option whose value cannot stand."""

    #: The option, for example ``train.global_batch``; what a group's choice says of its own options when it is made, it
    #: says without the group, which its caller adds (:meth:`ConfigError.under`).
    option: str
    value: object  #: Its value.
    rule: str  #: What the value must satisfy, with the numbers that the rule refers to.
    remedy: str = ""  #: What to do instead, for example ``"try 4, 8"``; empty when the rule says it all.

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.option}={as_typed(self.value)}: {self.rule}{remedy}"


class ConfigError(ValueError):
    """A configuration that cannot run, with every problem that was found; each of them once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        lines = {str(problem): problem for problem in problems}
        self.problems = tuple(lines.values())
        super().__init__("\n".join(lines))

    def under(self, group: str) -> ConfigError:
        """Return the same problems with the options named from the root: ``heads`` becomes ``model.heads``."""
        return ConfigError(replace(p, option=f"{group}.{p.option}") for p in self.problems)


def said(error: BaseException) -> str:
    """Return the message of an exception of whatever class, whose ``__str__`` may itself raise."""
    try:
        return str(error)
    except Exception as another:
        return f"(no message: the exception's own __str__ raised {type(another).__name__})"


def require(*problems: Problem | None) -> None:
    """Raise a :class:`ConfigError` with the problems that are not ``None``, if there are any."""
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError(found)


def under(group: str, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``step``; a ConfigError of it names its options from the root: ``heads`` becomes ``model.heads``."""
    try:
        return step(*args, **kwargs)
    except ConfigError as error:
        raise error.under(group) from None


class ErrorCollector:
    """Collects problems: a step that fails adds its own, and the next step is tried all the same."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []  #: What was found so far.

    def catch(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call ``step``; return its result, or ``None`` where it raised a ConfigError."""
        try:
            return step(*args, **kwargs)
        except ConfigError as error:
            self.problems += error.problems
            return None

    def close(self) -> None:
        """Raise a ConfigError with what was found, if anything was."""
        require(*self.problems)


def at_least(minimum: int, **options: object) -> list[Problem]:
    """Find every option that is not a whole number of at least ``minimum``."""
    return [
        Problem(option, value, f"must be a whole number of at least {minimum}")
        for option, value in options.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum
    ]


def divides(option: str, value: int, total: int, what: str) -> Problem | None:
    """Return a problem if ``value`` does not divide ``total``, which the rule calls ``what``."""
    if value >= 1 and total % value == 0:
        return None
    return Problem(option, value, f"must divide {what}", try_these(nearest_numbers(value, divisors(total))))


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def try_these(values: Iterable[object]) -> str:
    """Turn ``[4, 8]`` into ``"try 4, 8"``, and nothing into nothing."""
    text = ", ".join(str(value) for value in values)
    return f"try {text}" if text else ""


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the ``choices`` that a person who typed ``word``, in capitals or not, may have meant, best first."""
    by_lower = {choice.lower(): choice for choice in choices}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.6)]


def nearest_numbers(value: int, allowed: Sequence[int], count: int = 3) -> list[int]:
    """Return the ``count`` numbers of ``allowed`` that lie closest to ``value``, in ascending order."""
    return sorted(sorted(allowed, key=lambda number: abs(number - value))[:count])


def as_typed(value: object) -> str:
    """Write a value as it stands on the command line, where ``True`` is ``true`` and ``None`` is ``null``."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
