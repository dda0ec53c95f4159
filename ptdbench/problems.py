"""Problems of a configuration, and how to fix them.

This is the lowest module of the package: it imports none of the others, and all of them may raise a
:class:`ConfigError`. Problems are collected and shown together, so that a user can fix them all at once. Not left to
pydantic, whose errors name a model's field and one rule: these name the option as it is typed, its value, the rule with
the numbers it depends on, and what to type instead.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Problem:
    """One option whose value is invalid."""

    #: The option, for example ``train.global_batch``. A group's choice names its options without the group when it is
    #: constructed; its caller adds the group (:meth:`ConfigError.under`).
    option: str
    value: object  #: Its value.
    rule: str  #: What the value must satisfy, with the numbers that the rule refers to.
    remedy: str = ""  #: What to do instead, for example ``"try 4, 8"``; empty if the rule says it all.

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.option}={as_typed(self.value)}: {self.rule}{remedy}"


class ConfigError(ValueError):
    """A configuration that cannot run, with every problem found, each listed once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        lines = {str(problem): problem for problem in problems}
        self.problems = tuple(lines.values())
        super().__init__("\n".join(lines))

    def under(self, group: str) -> ConfigError:
        """Return the same problems with the options named from the root: ``heads`` becomes ``model.heads``."""
        return ConfigError(replace(p, option=f"{group}.{p.option}") for p in self.problems)


def message_of(error: BaseException) -> str:
    """Return the message of any exception, even one whose ``__str__`` raises."""
    try:
        return str(error)
    except Exception as another:
        return f"(no message: the exception's own __str__ raised {type(another).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class if it has none."""
    return message_of(error).strip().partition("\n")[0] or type(error).__name__


def require(*problems: Problem | None) -> None:
    """Raise a :class:`ConfigError` with the problems that are not ``None``, if there are any."""
    if present := [problem for problem in problems if problem is not None]:
        raise ConfigError(present)


#: A rule: whether it is broken, the option, its value, the rule in words, and the remedy.
Row = tuple[bool, str, object, str, str]


def broken(rows: Iterable[Row]) -> Iterator[Problem]:
    """Yield a problem for every rule that is broken."""
    return (Problem(option, value, rule, remedy) for is_broken, option, value, rule, remedy in rows if is_broken)


def under(group: str, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``step``; if it raises ConfigError, name the options from the root: ``heads`` becomes ``model.heads``."""
    try:
        return step(*args, **kwargs)
    except ConfigError as error:
        raise error.under(group) from None


class ErrorCollector:
    """Collects problems: a step that fails adds its problems, and the next step is tried regardless."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []  #: The problems found so far.

    def catch(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call ``step``; return its result, or ``None`` if it raised ConfigError."""
        try:
            return step(*args, **kwargs)
        except ConfigError as error:
            self.problems += error.problems
            return None

    def close(self) -> None:
        """Raise a ConfigError with the problems found, if there are any."""
        require(*self.problems)


def at_least(minimum: int, **options: object) -> list[Problem]:
    """Return a problem for every option that is not a whole number of at least ``minimum``."""
    return [
        Problem(option, value, f"must be a whole number of at least {minimum}")
        for option, value in options.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum
    ]


def differing(runs: Sequence[Mapping[str, object]], rule: str, remedy: str) -> Iterator[Problem]:
    """Yield a problem for every option that several runs do not have in common."""
    for option in dict.fromkeys(option for options in runs for option in options):
        values = dict.fromkeys(as_typed(options.get(option)) for options in runs)
        if len(values) > 1:
            yield Problem(option, ",".join(values), rule, remedy)


def divides(option: str, value: int, total: int, what: str) -> Problem | None:
    """Return a problem if ``value`` does not divide ``total``, which the rule calls ``what``."""
    if value >= 1 and total % value == 0:
        return None
    return Problem(option, value, f"must divide {what}", try_these(nearest_numbers(value, divisors(total))))


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    lower = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*lower, *(number // divisor for divisor in lower)})


def try_these(values: Iterable[object]) -> str:
    """Turn ``[4, 8]`` into ``"try 4, 8"``, and an empty list into an empty string."""
    text = ", ".join(str(value) for value in values)
    return f"try {text}" if text else ""


def nearest(word: str, choices: Iterable[str]) -> list[str]:
    """Return the three ``choices`` closest to a mistyped ``word``, regardless of case, best first."""
    by_lower = {choice.lower(): choice for choice in choices}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower)]


def meant(message: str, flags: Iterable[str], words: Sequence[str]) -> str:
    """Return an error of argparse with what to type instead: a command, one of ``flags``, or an option of ours.

    ``--model gpt_tiny`` among the ``words`` of the command line becomes ``model=gpt_tiny``.
    """
    if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        tries = nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
    else:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        tries = [_instead(flag, [*flags], words) for flag in unknown if flag in words]
    return "; ".join(filter(None, [message, try_these(filter(None, tries))]))


def _instead(flag: str, flags: Sequence[str], words: Sequence[str]) -> str:
    """Return the flag of ``flags`` that a mistyped one resembles, or the option that it is elsewhere; else nothing."""
    name, _, value = flag.lstrip("-").partition("=")
    following = "".join(words[words.index(flag) + 1 :][:1])
    value = value or ("" if "=" in following or following.startswith("-") else following)
    near = nearest(name, [listed[2:] for listed in flags if listed.startswith("--")])
    takes_options = "--config-dir" in flags  # only with the folder of their configurations
    return f"--{near[0]}" if near else f"{name}={value}" if value and takes_options else ""


def nearest_numbers(value: int, allowed: Sequence[int]) -> list[int]:
    """Return the three numbers of ``allowed`` closest to ``value``, in ascending order."""
    return sorted(sorted(allowed, key=lambda number: abs(number - value))[:3])


def in_shell(option: str, value: object) -> str:
    """Return an override as it is pasted into a shell: quoted, doubly where it has Hydra's quotes, if need be."""
    word = f"{option}={as_typed(value)}"
    return f'"{word}"' if "'" in word and not {*'"$`!\\'} & {*word} else shlex.quote(word)


def as_typed(value: object) -> str:
    """Return a value as it is typed on the command line, where ``True`` is ``true`` and ``None`` is ``null``."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_typed(within)}' for key, within in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
