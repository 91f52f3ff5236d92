"""What a refused call must leave: one line that says why, and a model as it was."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import mctf


def assert_refused(model: Any, text: str, call: Callable[[], object]) -> None:
    """The call raises MctfError with this text in one line, and the model stays as it was."""
    before = snapshot(model)
    with pytest.raises(mctf.MctfError) as caught:
        call()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(model) == before


def snapshot(model: Any) -> list[object]:
    """What a refused call could have changed: the modules themselves, their modes and their parameters."""
    if not isinstance(model, nn.Module):
        return [model]
    modules = [(path, id(module), module.training) for path, module in model.named_modules()]
    return [*modules, *((path, id(value), value._version) for path, value in model.state_dict(keep_vars=True).items())]
