"""A refused call raises one line with the reason and does not change the model."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import mctf


def assert_refused(model: Any, text: str, call: Callable[[], object]) -> None:
    """The call raises MctfError with this text in one line, and the model is unchanged."""
    before = snapshot(model)
    with pytest.raises(mctf.MctfError) as caught:
        call()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(model) == before


def snapshot(model: Any) -> list[object]:
    """What a refused call could change: the modules, their modes and their parameters."""
    if not isinstance(model, nn.Module):
        return [model]
    modules = [(path, id(module), module.training) for path, module in model.named_modules()]
    return [*modules, *((path, id(value), value._version) for path, value in model.state_dict(keep_vars=True).items())]
