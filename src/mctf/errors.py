"""The one exception that users see: what was expected, what came, what to do about it."""

import errno
import re
from collections.abc import Iterable
from difflib import get_close_matches

_OVERLONG, _KEPT = re.compile(r"\S{320,}"), 120  # of a word, at both ends
_MANY = 60  # more words than an error message should list

# How PyTorch words a failed allocation. On a CPU it is a RuntimeError like any other.
_ALLOCATION = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "storage size calculation overflowed",
    "failed to map segment",  # of a library that is loaded
)


class MctfError(ValueError):
    """Input that mctf refuses. The message is one sentence that names the cure, and one line whatever it quotes."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """The text with escapes for what is not printable, and overlong words without their middle.

    Names of files may hold line breaks and terminal commands.
    """
    if not text.isprintable():
        text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return _OVERLONG.sub(lambda word: f"{word[0][:_KEPT]}…{word[0][-_KEPT:]}", text)


def shown(value: object, limit: int = 80) -> str:
    """The value as Python writes it, in one short line: for messages that quote what a user gave."""
    try:
        text = one_line(repr(value))
    except Exception:  # repr of another's class, or of a number with too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A clause for an error message: the closest valid word, or the list of all of them unless they are many."""
    spelled = {each.lower(): each for each in sorted(choices)}
    close = get_close_matches(word[:100].lower(), spelled, n=1)
    if close:
        return f"did you mean {spelled[close[0]]!r}?"
    if len(spelled) > _MANY:
        return f"no close match among {len(spelled):,} names"
    return f"choose from {', '.join(spelled.values())}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports a failed allocation, on a CPU or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (RuntimeError, ImportError)) and any(text in str(error).lower() for text in _ALLOCATION)
