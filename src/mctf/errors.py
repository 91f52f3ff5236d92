"""The one exception that users see: what was expected, what came, what to do about it."""

from collections.abc import Iterable
from difflib import get_close_matches

_MANY = 60  # more words than an error message should list


class MctfError(ValueError):
    """Input that mctf refuses. The message is one sentence that names the cure, in one line that a terminal prints."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text with escapes for what is not printable: names of files may hold line breaks and terminal commands."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A clause for an error message: the closest valid word, or the list of all of them unless they are many."""
    spelled = {each.lower(): each for each in sorted(choices)}
    close = get_close_matches(word.lower(), spelled, n=1)
    if close:
        return f"did you mean {spelled[close[0]]!r}?"
    if len(spelled) > _MANY:
        return f"no close match among {len(spelled):,} names"
    return f"choose from {', '.join(spelled.values())}"
