"""The one exception that users see: what was expected, what came, what to do about it."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_OVERLONG, _KEPT = re.compile(r"\S{320,}"), 120  # of a word, at both ends
_MANY = 60  # more words than an error message should list


class MctfError(ValueError):
    """Input that mctf refuses. The message is one sentence that names the cure, in one line that a terminal prints."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text in one line: escapes for what is not printable, and overlong words without their middle.

    Names of files may hold line breaks and terminal commands.
    """
    if not text.isprintable():
        text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return _OVERLONG.sub(lambda word: f"{word[0][:_KEPT]}…{word[0][-_KEPT:]}", text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory is exhausted; on the CPU torch raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("allocate memory" in text or "out of memory" in text)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A clause for an error message: the closest valid word, or the list of all of them unless they are many."""
    spelled = {each.lower(): each for each in sorted(choices)}
    close = get_close_matches(word.lower(), spelled, n=1)
    if close:
        return f"did you mean {spelled[close[0]]!r}?"
    if len(spelled) > _MANY:
        return f"no close match among {len(spelled):,} names"
    return f"choose from {', '.join(spelled.values())}"
