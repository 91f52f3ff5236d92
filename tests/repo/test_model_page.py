"""docs/models.md agrees with the test matrix."""

from importlib.util import find_spec

import pytest
from torch import nn

import mctf
from helpers import model_page
from helpers.families.timm_eva import NEWER, SHARED_KEYS
from helpers.model_features import FEATURES, features_of
from helpers.model_page import PAGE, method_rows, page
from helpers.models import NAMES, make

complete = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("open_clip") is None or len(SHARED_KEYS) < len(NEWER),
    reason="without transformers or open_clip, or with an older timm, the matrix lacks some models",
)


@pytest.mark.nightly
@complete
@pytest.mark.slow
def test_the_page_is_written_from_the_matrix() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"


@complete
def test_every_feature_occurs_and_none_is_in_every_model() -> None:
    features = [set(features_of(make(name))) for name in NAMES]
    assert set.union(*features) == set(FEATURES)
    assert set.intersection(*features) == set()


def test_features_are_detected() -> None:
    assert features_of(make("registers")) == ["class token", "registers", "LayerScale"]
    assert features_of(make("plain")) == ["class token"]
    assert features_of(nn.Linear(2, 2)) == ["no class token"]


def test_a_refusing_method_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, method: str) -> nn.Module:
        if hasattr(model, "cls_token") and model.cls_token is None:
            raise mctf.MctfError("needs a class token: take another")
        return model

    monkeypatch.setattr(mctf, "fuse", refuse)
    monkeypatch.setattr(model_page, "NAMES", ("plain", "map_pool", "mean_pool"))
    monkeypatch.setattr(mctf, "unfuse", lambda model: model)
    assert method_rows({"tome": "merges"}) == (
        "| `tome` | merges | not map_pool, mean_pool: needs a class token: take another |\n"
    )
