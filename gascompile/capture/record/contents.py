"""Contents: what a tensor, an array or a set holds, to be compared with what it holds later."""

from __future__ import annotations

import array
import ctypes
import hashlib
import io
from typing import Any

import numpy
import torch

_FILES = (io.BytesIO, io.StringIO)
ARRAYS: tuple[Any, ...] = (
    numpy.ndarray,
    bytearray,
    array.array,
    memoryview,
    ctypes.Structure.__base__,
    *_FILES,
)
"""Kinds of which the bytes are compared; all values of ``ctypes`` have one base, which has no name."""


def raw_of(held: Any) -> bytes:
    """Return the bytes of an array of any kind."""
    try:
        if isinstance(held, _FILES):
            text = held.getvalue()
            raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
            return raw + held.tell().to_bytes(8, "little")
        return bytes(held.tobytes()) if hasattr(held, "tobytes") else bytes(held)
    except ValueError:  # closed or released
        return b""


def is_plain(value: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor lie in memory as ``bytes_of`` reads them."""
    is_there = value.device.type == "cpu" and value.layout is torch.strided
    return is_there and type(value) in {torch.Tensor, torch.nn.Parameter} and not value.is_quantized


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, as bytes: of numbers two that are none are not equal."""
    return value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def digest_of(raw: bytes) -> bytes:
    """Return what stands for many bytes."""
    return hashlib.blake2b(raw, digest_size=16).digest()


def elements_of(held: set[Any]) -> frozenset[tuple[type, Any]]:
    """Return what is in a set, of which 1 and True are not the same."""
    return frozenset(zip(map(type, held), held, strict=True))
