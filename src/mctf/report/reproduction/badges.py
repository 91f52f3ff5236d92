"""The small word that says where numbers come from."""

from collections.abc import Iterable

from .content import Column, Origin
from .markup import Markup, tag

_WORDS = {Origin.MEASURED: "measured", Origin.COUNTED: "counted", Origin.PAPER: "paper"}


def badge(origin: Origin) -> Markup:
    """Nothing where there is nothing to say."""
    return tag("span", _WORDS[origin], class_=f"badge {origin}") if origin in _WORDS else Markup()


def common_origin(columns: Iterable[Column]) -> Origin:
    """What all columns have in common, so that it is said once; NONE where they differ."""
    origins = {column.origin for column in columns}
    return origins.pop() if len(origins) == 1 else Origin.NONE
