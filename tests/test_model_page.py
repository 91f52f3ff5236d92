"""docs/models.md says what the test matrix holds."""

from importlib.util import find_spec

import pytest

from model_page import PAGE, page


@pytest.mark.skipif(find_spec("transformers") is None, reason="without transformers the matrix lacks its models")
def test_the_page_is_made_from_the_matrix() -> None:
    assert PAGE.read_text() == page(), "run python tests/model_page.py"
