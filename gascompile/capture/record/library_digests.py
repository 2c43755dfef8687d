"""Library digests: what the code of torch and of installed libraries finds under the names that it uses.

A program may have put something else there. What a capture itself puts where ``None`` was, as libraries make what they
need, is there or not yet in another process; both are as the library comes.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from gascompile.capture.fingerprint.code_fingerprint import module_digest
from gascompile.capture.fingerprint.code_names import absolute_name, names_of
from gascompile.capture.fingerprint.code_origin import (
    Origin,
    origin_of_module,
    origin_of_name,
)
from gascompile.capture.fingerprint.replaced import is_library_code
from gascompile.capture.fingerprint.value_digest import ValueDigest
from gascompile.capture.record.function_tables import table_of, tables_in, words_of
from gascompile.capture.record.library_values import (
    FirstSeen,
    asked,
    followed,
    is_plain_value,
    plain_places,
)
from gascompile.capture.record.recorder import Running
from gascompile.capture.record.watched import Reads

NOT_THERE = ""
"""In the place of a digest."""
_PLAIN = (int, float, complex, str, bytes)
_TRACES_ALONE = ("sympy", "mpmath", "torch._export")
"""By which torch exports and reckons with sizes: eager code runs none of it, and it imports as it goes."""
_MACHINERY = (
    "torch._C.", "torch._decomp", "torch._dynamo", "torch._functorch", "torch._guards",
    "torch._higher_order_ops", "torch._inductor", "torch._library", "torch._opaque_base", "torch._ops", "torch._prims",
    "torch._refs", "torch._subclasses", "torch.fx", "torch.library", "torch.utils._", "torchgen",
)  # fmt: skip
"""By which torch itself traces, mostly unseen: what it has come across is in registers and states of its own."""
_VERSIONED = {Origin.INSTALLED, Origin.TORCH}


def library_names(running: Running) -> dict[str, tuple[str, ...]]:
    """Return the globals that library code used which ran, by module."""
    used: dict[str, set[str]] = {}
    ran: set[str] = set()
    for body, space in running.code.values():
        name = space.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or vars(module) is not space or not isinstance(name, str):
            continue
        if not _counts(name):
            continue
        if name not in ran:
            ran.add(name)
            used.setdefault(name, set()).update(tables_in(space))
        names = names_of(body)
        for chain in names.chains:
            if chain[0] in space:
                holder, rest = _holder(name, chain, running.imported)
                used.setdefault(holder, set()).update([".".join(rest)] if rest else ())
        # What traces imports as it goes.
        for taken in names.imports if not name.startswith(_MACHINERY) else ():
            source = absolute_name(taken, space)
            if taken.names and _counts(source):
                used.setdefault(source, set()).update(taken.names)
    return {name: tuple(sorted(names)) for name, names in sorted(used.items())}


def _counts(name: str) -> bool:
    """Return whether it matters what stands in a module."""
    is_eager = not any(f"{name}.".startswith(f"{of}.") for of in _TRACES_ALONE)
    return is_eager and origin_of_module(sys.modules.get(name)) in _VERSIONED


def _holder(
    name: str, chain: Sequence[str], imported: Collection[str]
) -> tuple[str, Sequence[str]]:
    """Return the module, and the name in it, that a dotted name is looked for in.

    That is where it begins, or the last module on its way that the capture imported first: in another process that
    one is not there yet.
    """
    place, space = (name, chain), vars(sys.modules[name])
    for i, key in enumerate(chain):
        value = space.get(key)
        if not isinstance(value, types.ModuleType):
            break
        if value.__name__ in imported and _counts(value.__name__):
            place = (value.__name__, chain[i + 1 :])
        space = vars(value)
    return place


def library_digest(name: str, names: Iterable[str], reads: Reads, left_out: Collection[str]) -> str:
    """Return the digest of what a library's module holds under names.

    Args:
        name: of the module.
        names: in it, dotted.
        reads: attributes that count.
        left_out: places ``module:name`` that do not.
    """
    module = sys.modules.get(name)
    if module is None:
        return NOT_THERE
    counted = [key for key in names if f"{name}:{key}" not in left_out]
    parts: list[object] = [name]
    if origin_of_module(module) is Origin.INSTALLED:
        parts.append(module_digest(name))
    parts += [*_values(name, counted, reads, left_out)]
    return digest_of(repr(parts))


def _values(
    name: str, names: Sequence[str], reads: Reads, left_out: Collection[str]
) -> Iterator[object]:
    """Yield what tells what stands under ``names``, and what plain values are in it, from all else."""
    for (owner, key), place in sorted(plain_in({name: names}, reads), key=itemgetter(1)):
        if place not in left_out:
            yield place, repr(asked(owner, key))
    for key in names:
        value = _followed(vars(sys.modules[name]), key)
        if not (name.startswith(_MACHINERY) and _is_state(value)):
            yield key, _identity(value)


def set_first(used: Mapping[str, Iterable[str]], reads: Reads, first: FirstSeen) -> dict[str, str]:
    """Return what the capture itself put where ``None`` was, ``module:name``, as libraries make what they need.

    Returns:
        The digests of what is there now.
    """
    found = {}
    for name, names in used.items():
        if name in sys.modules:
            for chain in names:
                owner, key, value = followed(vars(sys.modules[name]), chain.split("."))
                if value is not None and first.was_none(owner, key):
                    found[f"{name}:{chain}"] = _made_digest(name, chain, reads)
    return found


def is_set_or_not_yet(place: str, made: str, reads: Reads) -> bool:
    """Return whether ``None`` stands at ``module:name``, or what the capture put there."""
    name, _, chain = place.partition(":")
    if name not in sys.modules:
        return True
    now = _followed(vars(sys.modules[name]), chain)
    return now is None or _made_digest(name, chain, reads) == made


def _made_digest(name: str, chain: str, reads: Reads) -> str:
    return digest_of(repr([*_values(name, [chain], reads, ())]))


def plain_in(
    used: Mapping[str, Iterable[str]], reads: Reads
) -> Iterator[tuple[tuple[Any, Any], str]]:
    """Yield the numbers, words and flags that are, or are in, what libraries' code finds under its names."""
    for name, names in used.items():
        module = sys.modules.get(name)
        if module is None or origin_of_module(module) is not Origin.INSTALLED:
            continue
        for chain in names:
            owner, key, value = followed(vars(module), chain.split("."))
            if is_plain_value(value) and key in owner:
                yield (owner, key), f"{name}:{chain}"
            for held, inner, place in plain_places(value, f"{name}:{chain}", reads.has):
                yield (held, inner), place


def _followed(space: Mapping[str, Any], chain: str) -> object:
    """Return what a dotted name leads to, as far as it goes through modules."""
    value: object = None
    for key in chain.split("."):
        value = space.get(key)
        # The registry of ops fills up with what is imported; nothing in it can be put in another's place.
        if not isinstance(value, types.ModuleType) or value is torch.ops:
            break
        space = vars(value)
    return value


def _identity(value: object) -> object:
    """Return what tells a function or a number from the one that a library comes with, and from any other one."""
    if isinstance(value, types.FunctionType):
        if not is_library_code(value):
            return _all_of(value)
        return value.__module__, value.__qualname__, value.__code__.co_firstlineno
    if isinstance(value, type | types.BuiltinFunctionType):
        is_own = isinstance(value, type) and origin_of_name(value.__module__) is Origin.USER
        return _all_of(value) if is_own else (value.__module__, value.__qualname__)
    if isinstance(value, partial) or origin_of_name(type(value).__module__) is Origin.USER:
        return _all_of(value)
    if isinstance(value, Mapping):
        table, keys = table_of(value)
        entries = [(words_of(key), _identity(table[key])) for key in keys]
        return type(value).__name__, sorted(entries, key=itemgetter(0))
    return (
        value if isinstance(value, _PLAIN) and not isinstance(value, bool) else type(value).__name__
    )


def _is_state(value: object) -> bool:
    """Return whether something is neither code nor the program's."""
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type | partial):
        return False
    return origin_of_name(type(value).__module__) is not Origin.USER


def _all_of(value: object) -> str:
    """Return the digest of a program's own value; another one each time where it holds what cannot be compared."""
    of = ValueDigest()
    of.value(value)
    text = of.digest()
    return secrets.token_hex() if of.opaque else text


def digest_of(text: str | bytes) -> str:
    """Return the digest of words."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
