"""Containers of Python's and torch's: in which of their attributes lies what a program has put into them.

Their methods are written in Python and versioned, so that the names of these attributes stand in no code of the
program's: ``settings["rate"]`` of a ``UserDict`` reads its ``data``, ``normal.log_prob(x)`` its ``scale``.
"""

from __future__ import annotations

import logging
import operator
import types
from collections.abc import Mapping
from functools import cache
from typing import Any

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file

_DATA = frozenset({"data"})
_HELD: Mapping[str, frozenset[str]] = {
    "collections.UserDict": _DATA,
    "collections.UserList": _DATA,
    "collections.UserString": _DATA,
    "collections.ChainMap": frozenset({"maps"}),
    "weakref.WeakValueDictionary": _DATA,
    "weakref.WeakKeyDictionary": _DATA,
    "_weakrefset.WeakSet": _DATA,
    "configparser.RawConfigParser": frozenset(
        {"_sections", "_defaults", "_proxies", "_interpolation", "default_section"}
    ),
    "configparser.SectionProxy": frozenset({"_parser", "_name"}),
    "queue.Queue": frozenset({"queue"}),
    "string.Template": frozenset({"template"}),
    "multiprocessing.sharedctypes.SynchronizedBase": frozenset({"_obj"}),
    "torch.amp.grad_scaler.GradScaler": frozenset(
        {"_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval", "_enabled"}
    ),
}
"""By the names of the classes: most programs load few of them."""
_PARTS = "torch.distributions."
"""A distribution, or one of its transforms, is what its attributes are."""
_FOUND = frozenset({"_cached_x_y", "_inv"})  # of those what transforms find as they run
_GOES_OVER = ("asdict", "astuple", "Namespace.")
"""Functions of ``dataclasses`` and methods of ``argparse`` that read whatever attributes an object has."""
INERT = (logging.Logger, logging.Handler, logging.Manager)
"""What they say is no part of what a model computes; the first capture of a process changes torch's own. Nor are the
lines of sources that messages quote: 120,000 of them once torch has shown some, which each call would compare."""
GETTERS = (operator.attrgetter, operator.methodcaller)


def is_held(owner: object, key: object) -> bool:
    """Return whether an attribute holds what was put into a container of Python's library."""
    kind: Any = type(owner)
    return key in _held_by(kind) or (_is_made_of_parts(kind) and key not in _FOUND)


@cache
def _is_made_of_parts(kind: Any) -> bool:
    return any(str(base.__module__).startswith(_PARTS) for base in kind.__mro__)


@cache
def _held_by(kind: Any) -> frozenset[str]:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return frozenset().union(*(_HELD.get(name, frozenset()) for name in names))


def goes_over_attributes(code: types.CodeType) -> bool:
    """Return whether a function of Python's library reads attributes by names that stand in no code."""
    path = code.co_filename
    return (
        path.endswith(("/dataclasses.py", "/argparse.py"))
        and code.co_qualname.startswith(_GOES_OVER)
        and origin_of_file(path) is Origin.PYTHON
    )


def names_asked(getter: Any) -> frozenset[str]:
    """Return the attributes that an ``attrgetter`` or ``methodcaller`` reads of whatever it is given."""
    made, given = getter.__reduce__()
    # With keywords, a method caller is made by a partial function that has its name.
    words = [word for word in (*getattr(made, "args", ()), *given) if isinstance(word, str)]
    return frozenset(name for word in words for name in word.split("."))
