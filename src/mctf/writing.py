"""Files that are complete or not there at all."""

import os
from pathlib import Path

from .errors import MctfError


def write_bytes(path: Path, content: bytes) -> None:
    """Write under a temporary name beside it, then rename: nobody ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as failure:
        raise MctfError(f"{path} cannot be written ({failure.strerror}): choose another file") from None
    finally:
        temporary.unlink(missing_ok=True)
