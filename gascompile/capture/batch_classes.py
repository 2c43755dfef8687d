"""Batch classes: what the program's own classes in a batch are made of, which a loss may ask for and no leaf shows.

A class has its name, the order of its fields, values and code; an object of it may have attributes that are no
field. Another class of the same name is another kind of batch.
"""

from __future__ import annotations

import copyreg
import enum
import threading
import types
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.capture.fingerprint.code_fingerprint import code_digest
from gascompile.capture.fingerprint.code_origin import origin_of_code, origin_of_name
from gascompile.core.errors import CaptureError

PLAIN = (bool, int, float, complex, str, bytes)
_SAID = (type(None), *PLAIN, range, slice, torch.dtype, torch.device, torch.layout, torch.memory_format)  # fmt: skip
"""Whose ``repr`` says all."""
_OF_CLASSES = {
    "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__", "__slotnames__",
    "__annotations__",
}  # fmt: skip
"""Entries of classes that say nothing of what their objects answer, or come and go as others look at the class."""
_FIELDS = {
    "__dataclass_fields__",
    "__dataclass_params__",
}  # made anew for every class of the same fields
Fact = tuple[object, ...]


def is_said(value: object) -> bool:
    """Return whether ``repr`` says all of a value: one of Python's own, or a tuple, list or dict of such."""
    kind = type(value)
    if kind is tuple or kind is list:
        return all(map(is_said, value))  # type: ignore[call-overload]  # it is one of them
    if kind is dict:
        return all(is_said(part) for item in value.items() for part in item)  # type: ignore[attr-defined]
    return kind in _SAID


def attributes_beside(value: object) -> dict[str, Any]:
    """Return the attributes of an object itself, those of slots among them."""
    names = [*getattr(value, "__dict__", ()), *copyreg._slotnames(type(value))]  # type: ignore[attr-defined]  # torch asks so, too
    missing = object()
    found = {name: getattr(value, name, missing) for name in names if name != "__dict__"}
    return {name: own for name, own in found.items() if own is not missing}


class Untold:
    """Stands for an attribute of a batch that no plan compares: its class, and that it is there, may be asked."""

    def __init__(self, name: str, kind: type) -> None:
        self.__dict__.update(_name=name, _kind=kind)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"the loss reads the attribute '{self.__dict__['_name']}' of a batch, which no plan compares; pass what it "
            "needs as an entry of the batch"
        )

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _refuse
    __rtruediv__ = __float__ = __int__ = __index__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __hash__ = object.__hash__
    __class__ = property(lambda self: self.__dict__["_kind"])  # what isinstance() asks for


def told(leaf: object) -> str:
    """Return a text that says all of a value of a batch which is no tensor.

    Raises:
        CaptureError: it has attributes of which that is not known.
    """
    kind = type(leaf)
    if kind in _SAID or kind.__module__.partition(".")[0] in ("numpy", "torch"):
        return repr(leaf)
    plain = next((base for base in PLAIN if isinstance(leaf, base)), None)
    text = repr(leaf) if plain is None or isinstance(leaf, enum.Enum) else plain.__repr__(leaf)
    attributes = {
        name: value
        for name, value in attributes_beside(leaf).items()
        # A member of an enum is made with its class, and there is one of it.
        if not isinstance(leaf, enum.Enum) or isinstance(value, torch.Tensor) or is_said(value)
    }
    for name, value in attributes.items():
        if not is_said(value):
            raise CaptureError(
                f"the batch holds a {kind.__module__}.{kind.__qualname__} whose attribute '{name}' is a "
                f"{type(value).__qualname__}, which no plan compares; pass it on its own in the batch"
            )
    return f"{kind.__module__}.{kind.__qualname__} {text} {sorted(attributes.items())}"


def class_facts(structure: pytree.TreeSpec, leaves: Iterable[object]) -> tuple[Fact, ...]:
    """Return what is to be known of the program's own classes in a batch.

    Args:
        structure: of the batch.
        leaves: its leaves.
    """
    facts: list[Fact] = []
    for part in _parts(structure, leaves):
        if isinstance(part, type):
            facts += _facts(part)
        elif isinstance(part, enum.Enum):
            facts.append(("a member", told(part)))
    return tuple(facts)


def program_parts(batch: Any) -> tuple[Any, ...]:
    """Return the classes, members of enumerations and functions in a batch: what of them a loss reads, is watched."""
    leaves, structure = pytree.tree_flatten(batch)
    return tuple(
        part
        for part in _parts(structure, leaves)
        if not isinstance(part, type) or any(map(_is_program, part.__mro__))
    )


def _parts(structure: pytree.TreeSpec, leaves: Iterable[object]) -> list[Any]:
    """Return, each once, the classes and functions of which a batch is made, and members of enumerations in it."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [structure]
    for leaf in leaves:
        waiting += (type(leaf), leaf) if isinstance(leaf, enum.Enum) else (type(leaf),)
    while waiting:
        part = waiting.pop()
        if isinstance(part, pytree.TreeSpec):
            waiting += (part.type, part.context, *part.children())
        elif isinstance(part, list | tuple):
            waiting += part  # of keys, and what makes entries that are missing
        elif isinstance(part, type | types.FunctionType | enum.Enum):
            found.setdefault(id(part), part)
    return list(found.values())


def _facts(kind: type) -> Iterator[Fact]:
    for base in filter(_is_program, kind.__mro__):
        members = {
            name: value
            for name, value in vars(base).items()
            if name not in _OF_CLASSES and not name.startswith("_abc_")
        }
        told = sorted((name, _member(value)) for name, value in members.items())
        rest = [value for name, value in members.items() if name not in _FIELDS]
        number = 0 if all(map(_is_told, rest)) else _which(base)
        yield base.__module__, base.__qualname__, *told, number


def _is_program(base: type) -> bool:
    # A class without a module of its own may be anybody's.
    return base.__module__ == "__main__" or not origin_of_name(base.__module__).versioned


def _is_told(value: object) -> bool:
    """Whether ``_member`` says all of an entry of a class that may be read."""
    if isinstance(value, staticmethod | classmethod):
        return _is_told(value.__func__)
    if isinstance(value, property):
        return all(map(_is_told, (value.fget, value.fset, value.fdel)))
    if isinstance(value, types.FunctionType):
        code = value.__code__
        if origin_of_code(value).versioned or code.co_qualname.startswith(_GENERATED):
            return True
        held = [_content(cell) for cell in value.__closure__ or ()]
        given = value.__defaults__, value.__kwdefaults__
        return all(is_said(part) or isinstance(part, type) for part in (*held, *given))
    return is_said(value) or hasattr(type(value), "__get__")


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


_GENERATED = "__create_fn__"
"""Functions that ``dataclasses`` makes, of what the class shows."""
_NUMBERS: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_COUNTS: Counter[tuple[str, str]] = Counter()
"""Of classes that hold more than can be told, their places among those of their name, and how many came."""
_lock = threading.Lock()


def _which(base: type) -> int:
    """Return the number of a class among those of its name, as it came: what others of it hold, nobody watches."""
    with _lock:
        if base not in _NUMBERS:
            name = base.__module__, base.__qualname__
            _NUMBERS[base] = _COUNTS[name]
            _COUNTS[name] += 1
        return _NUMBERS[base]


def _member(value: object) -> str:
    """Return what is known of an entry of a class; code is known by what it does, all else as far as it says."""
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {_member(value.__func__)}"
    if isinstance(value, property):
        return " ".join(map(_member, (value.fget, value.fset, value.fdel)))
    if isinstance(value, types.FunctionType):
        cells = [_said(_content(cell)) for cell in value.__closure__ or ()]
        defaults = f"{_said(value.__defaults__)} {_said(value.__kwdefaults__)}"
        return f"{code_digest(value.__code__)} {defaults} {cells}"
    inner = getattr(value, "func", None)
    if isinstance(inner, types.FunctionType):
        given = [_said(getattr(value, name, None)) for name in ("args", "keywords")]
        return f"{_member(inner)} {given}"
    return _said(value)


def _said(value: Any) -> str:
    return repr(value) if is_said(value) else type(value).__qualname__
