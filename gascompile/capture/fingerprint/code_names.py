"""What a function's bytecode names: globals with the attributes after them, imports, attributes of objects.

Names are read off the instructions, so that ``package.module.CONSTANT`` is one chain, and a module that is
handed on as a value (to ``getattr``, to another function) is told from one of which a constant is read.
"""

from __future__ import annotations

import contextlib
import dis
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from gascompile.capture.fingerprint.literal_names import ASKING, GLOBALS, literal_names

_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_BY_NAME = {
    "vars", "dir", "eval", "exec", "globals", "locals", "__dict__", "__getattribute__", "attrgetter", "methodcaller",
    "getmembers", "getmembers_static", "getattr_static", "__getstate__", "__reduce__", "__reduce_ex__", "__globals__",
}  # fmt: skip
_IMPORTING = {"__import__", "import_module", "modules"}
"""What gives the module of a name, which mostly stands in the code as a text."""
_FORMATTING = {"format", "format_map"}
_NAMESPACES = {"__dict__", "__globals__"}
_ATTRIBUTE = re.compile(r"\.(\w+)")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_BETWEEN = {"EXTENDED_ARG", "CACHE", "PUSH_NULL", "NOP"}

Chain = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement inside a function."""

    module: str
    level: int
    names: tuple[str, ...] | None
    """What ``from module import`` takes; ``None`` for ``import module``."""


@dataclass(frozen=True, slots=True)
class Names:
    """What code can reach by name."""

    chains: frozenset[Chain]
    """Globals, each with the attributes that are read of it at once."""
    imports: frozenset[Import]
    attributes: frozenset[str]
    """Attributes that are read of anything."""
    by_name: bool
    """Whether attributes may be read whose names stand in no instruction."""


@lru_cache(maxsize=8192)
def names_of(code: types.CodeType) -> Names:
    """Return what a function and the functions inside it name."""
    chains: set[Chain] = set()
    imports: set[Import] = set()
    attributes: set[str] = set()
    by_name = False
    for inner in codes_in(code):
        reader = _Reader()
        for instruction in dis.get_instructions(inner):
            reader.take(instruction)
        reader.end()
        chains |= reader.chains
        imports |= reader.imports
        attributes |= reader.attributes
        asked = literal_names(inner)
        # What is an attribute of something, as of builtins, is not followed.
        by_name = by_name or asked is None or reader.matches_by_place
        by_name = by_name or not ASKING.isdisjoint(reader.attributes)
        attributes.update(asked or ())
        texts = [text for text in inner.co_consts if isinstance(text, str)]
        if not _FORMATTING.isdisjoint(reader.attributes):
            attributes.update(part for text in texts for part in _formatted(text))
        if any(chain[-1] in _IMPORTING for chain in reader.chains):
            imports.update(Import(text, 0, None) for text in texts if _MODULE.fullmatch(text))
    by_name = by_name or any(chain[0] in _BY_NAME for chain in chains)
    by_name = by_name or not _BY_NAME.isdisjoint(attributes)
    return Names(frozenset(chains), frozenset(imports), frozenset(attributes), by_name)


def _formatted(text: str) -> Iterator[str]:
    """Yield what ``text.format`` reads of what it is given: attributes, and keys, which no one minds."""
    with contextlib.suppress(ValueError):
        for _, field, within, _ in Formatter().parse(text):
            yield from _ATTRIBUTE.findall(field or "")
            yield from _formatted(within or "")


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those that stand in its constants, at any depth."""
    yield code
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from codes_in(constant)


def absolute_name(taken: Import, space: Mapping[str, Any]) -> str:
    """Return the module that an import statement names."""
    if not taken.level:
        return taken.module
    package = str(space.get("__package__") or space.get("__name__") or "")
    base = package.rsplit(".", taken.level - 1)[0] if taken.level > 1 else package
    return f"{base}.{taken.module}" if taken.module else base


class _Reader:
    """Follows the instructions of one code object."""

    def __init__(self) -> None:
        self.chains: set[Chain] = set()
        self.imports: set[Import] = set()
        self.attributes: set[str] = set()
        self.matches_by_place = False
        self._open: list[str] = []
        self._constants: list[object] = [0, None]

    def take(self, instruction: dis.Instruction) -> None:
        name, value = instruction.opname, instruction.argval
        if name in _BETWEEN:
            return
        if name in _ATTRIBUTES:
            self.attributes.add(value)
            if value in _NAMESPACES and self._open and not instruction.is_jump_target:
                # Of a module: it counts as one that is handed on. Of a function: its module does.
                self._open = self._open if value == "__dict__" else self._open[:-1] or ["globals"]
                self.end()
                return
            # After a jump the object may be another one: the global counts as a whole.
            if self._open and not instruction.is_jump_target:
                self._open.append(value)
                return
        self.end()
        if name in GLOBALS:
            self._open = [value]
        elif name == "LOAD_CONST" or name.startswith("LOAD_SMALL_INT"):
            self._constants = [self._constants[-1], value]
        elif name == "IMPORT_NAME":
            level, taken = self._constants
            names = tuple(map(str, taken)) if isinstance(taken, tuple) else None
            self.imports.add(Import(value, level if isinstance(level, int) else 0, names))
        elif name == "MATCH_CLASS":
            # By name, and by place as the class says.
            named = self._constants[-1]
            self.attributes.update(map(str, named if isinstance(named, tuple) else ()))
            self.matches_by_place = self.matches_by_place or bool(instruction.arg)

    def end(self) -> None:
        if self._open:
            self.chains.add(tuple(self._open))
        self._open = []
