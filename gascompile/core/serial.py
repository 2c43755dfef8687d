"""Frozen dataclasses to versioned JSON and back, driven by their type hints.

A reader refuses what it does not know: an unknown field, a missing one, a wrong type, another format
or version. What a class's ``older(format)`` returns reads a format of before and turns it into the class.
Members of a union of dataclasses carry their ``TAG`` as ``"step"``.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import MAX_JSON_BYTES, read_regular, umask
from gascompile.core.json_readers import SCALARS, json_fields, older_format, reader_of, shown

T = TypeVar("T")
JsonValue = None | bool | int | float | str | list[Any] | dict[str, Any]


def json_name(name: str) -> Mapping[str, str]:
    """Return the metadata of a field that is called otherwise in files."""
    return {"json": name}


@functools.cache
def _left_out(cls: type) -> frozenset[str]:
    """Return the fields that a file does not name where they are ``None`` or empty."""
    return frozenset(f.name for f in dataclasses.fields(cls) if f.metadata.get("left_out"))


_EMPTY: tuple[object, ...] = ({}, "")


def to_json(value: object) -> JsonValue:
    """Return plain JSON data for a dataclass, mapping, sequence, enum or scalar."""
    if type(value) in SCALARS:
        return cast(JsonValue, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data: dict[str, Any] = {}
        if hasattr(value, "FORMAT"):
            data["format"] = value.FORMAT
        for name, json_name, _, _ in json_fields(type(value)):
            held = getattr(value, name)
            if name not in _left_out(type(value)) or not (held is None or held in _EMPTY):
                data[json_name] = to_json(held)
        return data
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_tagged(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON data")


@functools.cache
def _step_types() -> tuple[type, ...]:
    from gascompile.core.steps import Step

    return get_args(Step)


def _tagged(value: object) -> JsonValue:
    data = to_json(value)
    if isinstance(data, dict) and isinstance(value, _step_types()):
        return {"step": vars(type(value))["TAG"], **data}
    return data


def from_json(cls: type[T], data: object, *, where: str = "$") -> T:
    """Return an instance of dataclass ``cls``; ``where`` is the JSON path used in messages.

    Raises:
        FormatError: the data is not of this format, names an unknown field, lacks one or has a wrong type.
    """
    kind: type = cls
    return cast(T, reader_of(kind)(data, (where,)))


def reads(cls: type, named: object) -> bool:
    """Return whether objects of ``cls`` are read from data whose ``format`` is ``named``, today's or one of before."""
    if not isinstance(named, str):
        return False
    return named == getattr(cls, "FORMAT", None) or older_format(cls, named) is not None


def check_types(value: object, *, where: str = "$") -> None:
    """Check a dataclass that was built in Python as if it had been read from its JSON.

    Raises:
        FormatError: a field holds another type than it says, or a number that no file may hold.
    """
    try:
        data = to_json(value)
    except TypeError as error:
        raise FormatError(f"{where}: {error}; use plain numbers, texts, lists and dicts") from error
    from_json(type(value), data, where=where)


def dumps(value: object) -> str:
    """Return compact JSON text with a stable key order."""
    return json.dumps(to_json(value), separators=(",", ":"), allow_nan=False)


def digest(value: object) -> str:
    """Return a BLAKE2b digest of every field of ``value``."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))
    return raw_digest(text.encode())


def raw_digest(raw: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE2b digest of bytes."""
    return hashlib.blake2b(raw, digest_size=20).hexdigest()


def read_json(path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Return the JSON data of a file; ``strict`` as in ``parse_json``.

    Raises:
        FormatError: the file is not JSON, or is larger than any of ours.
        StorageError: the file cannot be read, or is no regular file.
    """
    raw = read_regular(path, max_bytes=MAX_JSON_BYTES)
    return parse_json(raw, where=os.fsdecode(path), strict=strict)


def parse_json(raw: bytes | str, *, where: str, strict: bool = True) -> Any:
    """Return JSON data.

    Args:
        raw: UTF-8 text.
        where: what messages call it.
        strict: refuse what Python's reader lets pass and the standard does not: ``NaN``, ``Infinity`` and a
            key that stands twice in one object. Files of other projects hold such.

    Raises:
        FormatError: it is not JSON, or nested more deeply than any format is.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
    except UnicodeDecodeError as error:
        # Text in UTF-16 begins with a mark; the rest is mostly a file of weights or an archive.
        is_text = isinstance(raw, bytes) and raw.startswith(
            (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        )
        advice = "save it in UTF-8" if is_text else "give one that this package wrote as JSON"
        raise FormatError(f"{where} is not a text file in UTF-8, so not JSON; {advice}") from error
    try:
        hooks: dict[str, Any] = (
            {"object_pairs_hook": _object, "parse_constant": _refuse_constant} if strict else {}
        )
        data = json.loads(text, **hooks)
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        raise FormatError(f"{where} is not valid JSON: {error}; write it again") from error
    if _depth_exceeds(data, MAX_DEPTH):
        raise _too_deep(where)
    return data


_NESTING = frozenset({dict, list})
MAX_DEPTH = 64
"""Of lists and objects in one another; what reads them may recurse."""


def _too_deep(where: str) -> FormatError:
    return FormatError(
        f"{where} is nested too deeply for any format of this package; write it again"
    )


def _depth_exceeds(data: Any, limit: int) -> bool:
    """Return whether ``data``, as Python's reader makes it, is nested more deeply than ``limit``."""
    level = [data] if type(data) in _NESTING else []
    for _ in range(limit + 1):
        level = [
            item
            for held in level
            for item in (held.values() if type(held) is dict else held)
            if type(item) in _NESTING
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} stands twice in one object")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def load(cls: type[T], path: str | os.PathLike[str]) -> T:
    """Read one object of a versioned format from a file; raises as ``read_json`` and ``from_json`` do."""
    return from_json(cls, read_json(path), where=f"{path}: $")


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file of our own, for this user alone, so that a kill at any moment leaves the old content or the new one.

    Raises:
        StorageError: the directory is not writable or the disk is full; no partial file stays behind.
    """
    with _told(path):
        _replace(Path(path), data, mode=None)


def write_output(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write what a user asked for at the path that was given, as ``write_atomic`` where that is a file or none yet.

    A link stays one and what it leads to is written, an older file's permissions stay, and what is no regular file,
    such as a pipe or a device, is written to.

    Raises:
        StorageError: it cannot be written.
    """
    with _told(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG | (0o666 & ~umask())
        if stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), data, mode=mode & 0o777)
            return
        with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY), "wb") as stream:
            stream.write(_raw(data))


def _replace(target: Path, data: bytes | str, *, mode: int | None) -> None:
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_raw(data))
            stream.flush()
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise


def _raw(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data


@contextlib.contextmanager
def _told(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # a path with a NUL character is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"cannot write {Path(path)}: {reason}; free space or choose another folder"
        ) from error
