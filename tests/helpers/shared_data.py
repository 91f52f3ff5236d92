"""Where the shared data folder lies, beside the repository, and how a test says that it needs a file of it."""

from pathlib import Path

import pytest

SHARED: Path = Path(__file__).resolve().parents[2].parent / "shared"


def needs_shared(*relative_paths: str) -> pytest.MarkDecorator:
    """A mark that skips a test where one of these files of the shared folder is absent."""
    absent = [path for path in relative_paths if not (SHARED / path).exists()]
    return pytest.mark.skipif(bool(absent), reason=", ".join(f"../shared/{path} is absent" for path in absent))
