"""Messages in short: an option, its value, what its rule depends on, and the remedy."""

import re


class Abridged(str):
    """A text in which "…" stands for any words: it equals every text that has the rest, in this order."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, said: object) -> bool:
        pattern = ".*".join(map(re.escape, self.split("…")))
        return isinstance(said, str) and re.fullmatch(pattern, said, re.DOTALL) is not None
