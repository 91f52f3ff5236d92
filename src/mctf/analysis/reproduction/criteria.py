"""The criteria by name, as the paper's ablations combine them."""

from typing import Any

_TEMPERATURES = {"sim": "tau_sim", "info": "tau_info", "size": "tau_size"}

ALL = "sim+info+size"
SUBSETS = ("sim", "info", "size", "sim+info", "sim+size", "info+size", ALL)


def options_of(criteria: str) -> dict[str, Any]:
    """Options of `mctf.fuse` under which these criteria alone count, as in "sim+info"; none of them for all three."""
    used = criteria.split("+")
    return {temperature: 0.0 for name, temperature in _TEMPERATURES.items() if name not in used}
