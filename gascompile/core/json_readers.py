"""Readers of JSON data, put together once per type from its hints, so that reading thousands of objects is fast.

A reader refuses what its type does not say, by the path to it; paths are put in words for messages alone.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gascompile.core.errors import FormatError

SCALARS = frozenset({bool, int, float, str})
Where = tuple[Any, ...]
"""The path to a value: a text, or the path to what holds it and its key there; put in words for messages alone."""
Reader = Callable[[Any, Where], Any]


def _words(where: Where) -> str:
    if len(where) == 1:
        return str(where[0])
    outer, key = where
    return f"{_words(outer)}[{key}]" if isinstance(key, int) else f"{_words(outer)}.{key}"


@functools.cache
def reader_of(hint: Any) -> Reader:
    """Return what reads a value of a type, put together once per type."""
    if hint in SCALARS:
        return _READERS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union_reader(args)
    if origin is tuple:
        return _tuple_reader(reader_of(args[0])) if args[0] is not str else _read_texts
    if origin is Mapping:
        return _mapping_reader(reader_of(args[1]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_reader(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _word_reader({member.value: member for member in hint})
    if origin is Literal:
        return _word_reader({word: word for word in args})
    return functools.partial(_read_scalar, hint)


def _dataclass_reader(cls: type) -> Reader:
    expected = getattr(cls, "FORMAT", None)

    def read(data: Any, where: Where) -> Any:
        if not isinstance(data, dict):
            raise FormatError(
                f"{_words(where)}: expected an object for {cls.__name__}, found {shown(data)}"
            )
        num_read = 0
        if expected is not None:
            if (written := data.get("format")) != expected:
                if isinstance(written, str) and (older := older_format(cls, written)) is not None:
                    return reader_of(older)(data, where).now()
                raise FormatError(
                    f"{_words(where)}: this reader knows the format {expected!r}, the data says {shown(written)}; "
                    f"write it again with this version"
                )
            num_read = 1
        values: dict[str, Any] = {}
        for name, json_name, reader, required in _field_readers(cls):
            if json_name in data:
                values[name] = reader(data[json_name], (where, json_name))
                num_read += 1
            elif required:
                raise FormatError(
                    f"{_words(where)}: the field {json_name!r} of {cls.__name__} is missing"
                )
        if num_read < len(data):
            known = {"format"} if expected is not None else set()
            known |= {json_name for _, json_name, _, _ in _field_readers(cls)}
            odd = min(key for key in data if key not in known)
            raise FormatError(f"{_words(where)}: unknown field {shown(odd)} in {cls.__name__}")
        return cls(**values)

    return read


def older_format(cls: type, named: str) -> type | None:
    """Return the type that reads a format of before, whose ``now()`` is a ``cls``; ``None`` where none does."""
    find = getattr(cls, "older", None)
    return None if find is None else find(named)


@functools.cache
def _field_readers(cls: type) -> tuple[tuple[str, str, Reader, bool], ...]:
    """Return the fields as ``json_fields`` does, with what reads each."""
    return tuple(
        (name, json_name, reader_of(hint), required)
        for name, json_name, hint, required in json_fields(cls)
    )


def _tuple_reader(reader: Reader) -> Reader:
    def read(data: Any, where: Where) -> Any:
        if not isinstance(data, list):
            raise FormatError(f"{_words(where)}: expected a list, found {shown(data)}")
        return tuple([reader(item, (where, i)) for i, item in enumerate(data)])

    return read


def _mapping_reader(reader: Reader) -> Reader:
    def read(data: Any, where: Where) -> Any:
        if not isinstance(data, dict):
            raise FormatError(f"{_words(where)}: expected an object, found {shown(data)}")
        return {str(key): reader(item, (where, str(key))) for key, item in data.items()}

    return read


def _union_reader(args: tuple[Any, ...]) -> Reader:
    optional = type(None) in args
    members = [arg for arg in args if arg is not type(None)]
    scalars = [arg for arg in members if arg in SCALARS]
    objects = [arg for arg in members if arg not in SCALARS]

    def of_one(classes: list[Any]) -> Reader:
        return reader_of(classes[0]) if len(classes) == 1 else _step_reader(classes)

    # A number or an object, such as a dimension that is fixed or named.
    of_object = of_one(objects or scalars)
    of_other = of_one(scalars or objects)

    def read(data: Any, where: Where) -> Any:
        if data is None and optional:
            return None
        return (of_object if isinstance(data, dict) else of_other)(data, where)

    return read


def _step_reader(members: list[Any]) -> Reader:
    by_tag: dict[str, list[tuple[str | None, Reader]]] = {}
    for member in members:
        told_by = getattr(member, "WITH", None)
        by_tag.setdefault(member.TAG, []).append((told_by, reader_of(member)))
    for of_tag in by_tag.values():
        # Who is told by a field stands before who is not.
        of_tag.sort(key=lambda pair: pair[0] is None)

    def read(data: Any, where: Where) -> Any:
        if not isinstance(data, dict):
            raise FormatError(f"{_words(where)}: expected a step, found {shown(data)}")
        tag = data.get("step")
        if not isinstance(tag, str) or tag not in by_tag:
            raise FormatError(f"{_words(where)}: unknown step {shown(tag)}")
        fields = {k: v for k, v in data.items() if k != "step"}
        readers = (reader for told_by, reader in by_tag[tag] if told_by is None or told_by in data)
        return next(readers)(fields, where)

    return read


def _word_reader(members: Mapping[str, str]) -> Reader:
    def read(data: Any, where: Where) -> Any:
        if not isinstance(data, str) or data not in members:
            raise FormatError(f"{_words(where)}: {shown(data)} is not one of {list(members)}")
        return members[data]

    return read


def _read_scalar(hint: Any, data: Any, where: Where) -> Any:
    accepted = (int, float) if hint is float else hint
    if not isinstance(data, accepted) or (isinstance(data, bool) and hint is not bool):
        raise FormatError(f"{_words(where)}: expected {hint.__name__}, found {shown(data)}")
    if isinstance(data, (int, float)) and not abs(data) <= _MAX_NUMBER[hint]:
        raise FormatError(f"{_words(where)}: {shown(data)} is no finite number of a sensible size")
    if hint is float and isinstance(data, int):
        return float(data)
    if isinstance(data, str) and not data.isascii() and not _is_text(data):
        raise FormatError(
            f"{_words(where)}: {shown(data)} holds half a character; write whole ones"
        )
    return data


_MAX_NUMBER = {bool: 1, int: (1 << 63) - 1, float: 1e300}
"""What int64 and the solver's doubles hold; NaN compares false and so never passes."""


def _read_text(data: Any, where: Where) -> Any:
    if type(data) is str and data.isascii():
        return data
    return _read_scalar(str, data, where)


def _read_int(data: Any, where: Where) -> Any:
    if type(data) is int and -_MAX_INT <= data <= _MAX_INT:
        return data
    return _read_scalar(int, data, where)


def _read_float(data: Any, where: Where) -> Any:
    if type(data) is float and -_MAX_FLOAT <= data <= _MAX_FLOAT:
        return data
    return _read_scalar(float, data, where)


def _read_texts(data: Any, where: Where) -> Any:
    if type(data) is list and set(map(type, data)) <= _TEXT and all(map(str.isascii, data)):
        return tuple(data)
    return _read_each_text(data, where)


_MAX_INT, _MAX_FLOAT = _MAX_NUMBER[int], _MAX_NUMBER[float]
_TEXT = frozenset({str})
_read_each_text = _tuple_reader(_read_text)
_READERS: Mapping[type, Reader] = {
    str: _read_text,
    int: _read_int,
    float: _read_float,
    bool: functools.partial(_read_scalar, bool),
}


def _is_text(data: str) -> bool:
    """Return whether ``data`` can be printed and written; JSON's escapes can spell lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in data)


def shown(data: object) -> str:
    """Return data for a message: short, and in ASCII; of what holds other data its type alone."""
    if data is not None and not isinstance(data, (bool, int, float, str)):
        return type(data).__name__
    if isinstance(data, int) and data.bit_length() > 200:
        return f"an int of {data.bit_length()} bits"
    text = ascii(data)
    return text if len(text) <= 80 else f"{text[:77]}..."


@functools.cache
def json_fields(cls: type) -> tuple[tuple[str, str, Any, bool], ...]:
    """Return ``(python name, JSON name, type, required)`` of each field of a dataclass."""
    hints = get_type_hints(cls)
    return tuple(
        (
            f.name,
            f.metadata.get("json", f.name),
            hints[f.name],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
    )
