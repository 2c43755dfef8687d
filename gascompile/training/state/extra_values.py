"""Extra values: what callers add to a checkpoint, as JSON that says what is no JSON: tuples, counters, other keys.

States of torch's schedulers and of Python's random numbers are made of these: ``MultiStepLR.milestones`` is a counter
of whole numbers, ``random.getstate()`` a tuple.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

TAGGED = "extra_tagged"
"""The entry beside ``extra`` of a state whose ``extra`` has tags; older ones have neither."""
_TUPLE, _DICT, _COUNTER, _FLOAT = "$tuple", "$dict", "$counter", "$float"
_INFINITIES = ("inf", "-inf")  # which JSON has not; NaN is none of anybody's state


def encoded(extra: Mapping[Any, Any]) -> tuple[dict[str, Any], bool]:
    """Return values as JSON has them, and whether it needed tags for that.

    Raises:
        ValueError: they are no mapping, or one of them is none of what JSON, and these tags, can say; names it.
    """
    if not isinstance(extra, Mapping):
        raise ValueError(
            f"extra is a {type(extra).__name__}, and has to be a dict, such as "
            "{'scheduler': scheduler.state_dict()}"
        )
    whole = extra if isinstance(extra, dict) else dict(extra)
    try:
        written = _written(whole, "extra")
    except RecursionError:
        raise ValueError("extra holds itself, or too many values within each other") from None
    return written, _has_tags(whole)


def decoded(value: Any) -> Any:
    """Return what was encoded, of the same types.

    Raises:
        ValueError: a tag is damaged.
    """
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if tag not in _READ:
        return {key: decoded(item) for key, item in value.items()}
    try:
        return _READ[tag](value[tag])
    except TypeError as error:
        raise ValueError(f"{tag} has {value[tag]!r}") from error


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return [(decoded(key), decoded(item)) for key, item in value]


def _infinity(value: Any) -> float:
    if value not in _INFINITIES:
        raise ValueError(f"{_FLOAT} has {value!r}")
    return float(value)


_READ: Mapping[str, Callable[[Any], Any]] = {
    _TUPLE: lambda value: tuple(map(decoded, value)),
    _DICT: lambda value: dict(_pairs(value)),
    _COUNTER: lambda value: Counter(dict(_pairs(value))),
    _FLOAT: _infinity,
}


def _tag_of(value: Any) -> str:
    """Return the tag that a value needs, if it needs one."""
    if isinstance(value, tuple):
        return _TUPLE
    if isinstance(value, Counter):
        return _COUNTER
    if isinstance(value, float) and math.isinf(value):
        return _FLOAT
    if isinstance(value, dict):
        is_plain = all(isinstance(key, str) for key in value)
        looks_tagged = len(value) == 1 and next(iter(value)) in _READ
        return _DICT if not is_plain or looks_tagged else ""
    return ""


def _has_tags(value: Any) -> bool:
    if _tag_of(value):
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_tags, inner))


def _written(value: Any, where: str) -> Any:
    tag = _tag_of(value)
    if tag == _FLOAT:
        return {tag: str(float(value))}
    if tag in (_DICT, _COUNTER):
        rows = [
            [_written(key, f"a key of {where}"), _written(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {tag: rows}
    if isinstance(value, (tuple, list)):
        items = [_written(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return {tag: items} if tag else items
    if isinstance(value, dict):
        return {key: _written(item, f"{where}[{key!r}]") for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and not math.isnan(value):
        return value
    what = "NaN" if isinstance(value, float) else f"a {type(value).__name__}"
    raise ValueError(
        f"{where} is {what}: extra has to be JSON values without NaN, infinite numbers, tuples, counters and dicts of "
        "them; convert tensors by tolist(), and keep what is large in a file of its own"
    )
