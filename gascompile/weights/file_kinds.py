"""Which format a file of weights is of, by how it begins or by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gascompile.core.errors import StorageError
from gascompile.core.files import is_file, open_regular

GGUF_MAGIC: Final = b"GGUF"
PICKLED: Final = frozenset((".bin", ".pt", ".pth", ".ckpt"))
"""How the names of files of ``torch.save`` end."""


def is_gguf(file: Path) -> bool:
    """Return whether a file is, or says that it is, of llama.cpp's format."""
    return _starts_with(file, GGUF_MAGIC)


def is_onnx(file: Path) -> bool:
    """Return whether a file says by its name that it is an ONNX model; the format has no mark of its own."""
    return file.suffix == ".onnx" and is_file(file)


def is_pickled(file: Path) -> bool:
    """Return whether a file is of ``torch.save``, of today's format or of the one before torch 1.6."""
    return _starts_with(file, b"PK\x03\x04") or (
        file.suffix in PICKLED and _starts_with(file, b"\x80")
    )


def _starts_with(file: Path, magic: bytes) -> bool:
    """Return whether a file begins with some bytes; not where it cannot be read."""
    try:
        with open(open_regular(file), "rb") as stream:
            return stream.read(len(magic)) == magic
    except (OSError, StorageError):
        return False
