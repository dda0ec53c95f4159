"""What is refused, and how tests compare its words: option, value, what the rule depends on, and remedy."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ptdbench.problems import ConfigError


def refusal_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return str(caught.value)


class Abridged(str):
    """A text in which "…" stands for any words: it equals every text that has the rest, in this order."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, said: object) -> bool:
        pattern = ".*".join(map(re.escape, self.split("…")))
        return isinstance(said, str) and re.fullmatch(pattern, said, re.DOTALL) is not None
