"""The one exception users meet: what was expected, what came, what to do about it."""

from collections.abc import Iterable
from difflib import get_close_matches

_MANY = 60  # words that nobody reads through in an error


class MctfError(ValueError):
    """Input that mctf refuses. The message is one sentence that names the cure."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A ready clause for an error text: the closest known word, or the list of all of them unless they are many."""
    spelled = {each.lower(): each for each in sorted(known)}
    close = get_close_matches(word.lower(), spelled, n=1)
    if close:
        return f"did you mean {spelled[close[0]]!r}?"
    if len(spelled) > _MANY:
        return f"it is like none of the {len(spelled)} that are known, look it up"
    return f"choose from {', '.join(spelled.values())}"
