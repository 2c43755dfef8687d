"""Files of weights, opened for reading; what goes wrong meanwhile is told as an error of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gascompile.core.errors import CheckpointError, StorageError
from gascompile.core.files import open_regular


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file while it is read; raises ``CheckpointError`` where it cannot be."""
    try:
        with open(open_regular(file), "rb") as stream:
            yield stream
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except StorageError as error:
        raise CheckpointError(str(error)) from error
