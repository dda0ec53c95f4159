"""Checks options against the signature of the callable that they are passed to: names, presence and types.

Every config group ends in a call (``_target_`` and its arguments). The callable's annotations are the schema, so that
an option is declared once, where it is used, and all problems are found before anything is called. Not with pydantic:
its ``validate_call`` by default converts values (``"5"`` and ``5.0`` pass for 5), and has to wrap third-party classes.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ptdbench.problems import Problem, as_typed, nearest, try_these

#: The types of values that a configuration can hold, by annotation.
KINDS: dict[Any, Any] = {float: (int, float), int: int, bool: bool, str: str, type(None): type(None)}

#: Lists whose elements are checked, in words, by the arguments of their annotations.
_LISTS: dict[tuple[Any, ...], str] = {
    (str,): "a list of text", (int,): "a list of whole numbers", (float,): "a list of numbers",
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A range of numbers, as an annotation of an option's type: ``Annotated[int, at_least(1)]``."""

    holds: Callable[[float], bool]  #: Whether a number is inside; false for NaN.
    rule: str  #: The range in words.
    remedy: str = ""  #: What to try.


def at_least(minimum: int) -> Limit:
    """Return the limit of whole numbers from a minimum on."""
    return Limit(lambda number: number >= minimum, f"must be at least {minimum}")


#: The remedy for elements that YAML does not read as text.
_QUOTE = """quote numbers, true, false and null, as in "['3.10','true']\""""

#: Kinds of parameters that can be passed by position.
IN_ORDER = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name; a C function without a signature takes any option."""
    try:
        return inspect.signature(target).parameters
    except ValueError:
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


def problems(
    target: Callable[..., Any], options: Mapping[str, Any], passed: Sequence[str] = (), group: str = ""
) -> list[Problem]:
    """Return the problems of calling ``target(**options)``, without calling it.

    ``passed`` are parameters that the program passes itself, for example a model's parameters to an optimizer.
    Suggested options are prefixed with ``group``; the caller adds the prefix to the problems' options.
    """
    takes = parameters(target)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    named = {name: p for name, p in takes.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    except Exception:  # evaluates annotations, which may be third-party code
        hints = {}
    refusals = []
    for option, value in options.items():
        if option not in named and not takes_any:
            close = nearest(option, [name for name in named if name not in passed])
            prefixes = {name: "+" * (name not in options) for name in close}  # one that no file sets is added
            meant = [f"{prefixes[name]}{group}.{name}" if group else name for name in close]
            refusals.append(Problem(option, value, "there is no such option", try_these(meant)))
        elif option in hints:
            fitting = [limits for member, limits in _alternatives(hints[option]) if _fits(value, member)]
            exceeded = [limit for limits in fitting for limit in limits if not limit.holds(value)]
            refusals += [Problem(option, value, limit.rule, limit.remedy) for limit in exceeded]
            if not fitting:
                rule = f"must be {_spelled(hints[option])}"
                remedy = _QUOTE if isinstance(value, list) and _LISTS[str,] in rule else ""
                refusals.append(Problem(option, value, rule, remedy))
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in options and name not in passed:
            refusals.append(Problem(name, "(not set)", "must be given"))
    return refusals


def _alternatives(hint: Any) -> list[tuple[Any, Sequence[Limit]]]:
    """List a union's members; if there are numbers, only those a config can hold: ``float`` of ``float | Tensor``."""
    members = list(_members(hint))
    if not any(member in (int, float) for member, _ in members):
        return members
    return [pair for pair in members if pair[0] in KINDS or get_origin(pair[0]) or pair[0] is Any]


def _members(hint: Any, limits: Sequence[Limit] = ()) -> Iterator[tuple[Any, Sequence[Limit]]]:
    """Yield a union's members, each with its limits."""
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member)
    elif get_origin(hint) is Annotated:
        yield from _members(get_args(hint)[0], [limit for limit in hint.__metadata__ if isinstance(limit, Limit)])
    elif isinstance(hint, TypeVar) and hint.__bound__:
        yield from _members(hint.__bound__)
    else:
        yield hint, limits


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin in (list, tuple, Sequence):
        kind = get_args(hint)
        return isinstance(value, list | tuple) and (kind not in _LISTS or all(_fits(item, *kind) for item in value))
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if hint in (int, float) and isinstance(value, bool):
        return False  # in Python, a bool is an int
    # Annotations of other types accept any value.
    return isinstance(value, KINDS[hint]) if hint in KINDS else True


def _spelled(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    spelled = []
    for member, _ in _alternatives(hint):
        if get_origin(member) is Literal:
            spelled += [as_typed(choice) for choice in get_args(member)]
        else:
            containers = {dict: "a mapping", Mapping: "a mapping", None: str(member)}
            name = names.get(member) or _LISTS.get(get_args(member))
            spelled.append(name or containers.get(get_origin(member), "a list"))
    return " or ".join([", ".join(spelled[:-1]), spelled[-1]] if len(spelled) > 1 else spelled)
