"""HTML and SVG written by functions: text is escaped unless it is markup already."""

from html import escape


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """An element. Attributes: class_ for class, aria_label for aria-label; None and False leave one out."""
    return Markup(f"<{name}{_attributes(attributes)}>{join(*children)}</{name}>")


def void(name: str, /, **attributes: object) -> Markup:
    """An element that has no end tag in HTML: img, input, meta."""
    return Markup(f"<{name}{_attributes(attributes)}>")


def join(*children: str) -> Markup:
    """Several pieces one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child, quote=False) for child in children))


def _attributes(attributes: dict[str, object]) -> str:
    words = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        words.append(f" {name}" if value is True else f' {name}="{escape(str(value))}"')
    return "".join(words)
