"""Trial: one more capture that shows whether what the program changes in it matters for what is captured.

Two are made: one with the real values, one with opaque ones in their place. Where the second executes the
same instructions and looks at none of them, no other value can give another graph either. Afterwards all is
as it was before.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file
from gascompile.capture.record.asked_settings import replaced
from gascompile.capture.record.draws import Drawn, drawing_functions, random_states
from gascompile.capture.record.opaque import (
    OpaqueNumber,
    UsedError,
    Uses,
    is_kept,
    is_opaque,
    is_talk,
    opaque,
)
from gascompile.capture.record.recorder import drawing
from gascompile.capture.record.snapshot import Snapshot, get, holder_of, own_space, put
from gascompile.capture.record.watched import Watches

_CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns",
)  # fmt: skip
"""Functions of ``time`` that a trial stands in for."""
_APART = ("/sympy/", "/mpmath/", "/weakref.py", "/_weakrefset.py")
"""What torch itself computes with, and remembers, and what runs when something dies."""
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
"""What two of are compared by value: others may answer by more than true or false."""
_Trace = Callable[[types.FrameType, str, Any], Any]


def _clocks() -> dict[int, Drawn]:
    return {
        id(getattr(time, name)): Drawn(
            f"the time that {name}() tells", int if name.endswith("_ns") else float
        )
        for name in _CLOCKS
        if hasattr(time, name)
    }


class Trial:
    """What to replace in a capture, and what was seen of it."""

    def __init__(
        self,
        suspects: frozenset[str],
        spaces: Iterable[dict[str, Any]],
        *,
        is_opaque: bool,
        keeps: bool = False,
        collected: bool = False,
    ) -> None:
        """Change nothing yet.

        Args:
            suspects: names of the values, as ``Watches`` has them.
            spaces: globals of the code that ran.
            is_opaque: whether to put opaque values there.
            keeps: whether to put some in the place of tensors, too. Each call is then one of several in a trace, and
                leaves others of the same kind.
            collected: whether the garbage collector has gone over everything and was at rest since then.
        """
        self.suspects, self.is_opaque, self._keeps = suspects, is_opaque, keeps
        # What was made since is the youngest generation: a tenth of a second less than all that libraries have loaded.
        self._generation = 0 if collected else 2
        self.uses = Uses()
        self.seeded: set[str] = set()
        """Random numbers that the program seeds by a number before it draws."""
        self._spaces = list(spaces)
        self._stand_ins = {**_clocks(), **drawing_functions()}
        self._draws = random_states()
        self._real: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._placed: list[tuple[Any, Any, Any, Any]] = []
        """Where opaque values were put: who held what, as whose, under which key, and it."""
        self._before: Watches | None = None
        self._is_moved = False
        self.reached: frozenset[str] = frozenset()
        """Names of other values in whose place one was found."""
        self._path = hashlib.blake2b(digest_size=16)

    @property
    def path(self) -> bytes:
        """Return a digest of all instructions that the program executed."""
        return self._path.digest()

    @contextmanager
    def active(self, before: Watches) -> Iterator[None]:
        """Enclose the capture.

        Args:
            before: all values that the model and its code reach.
        """
        self._before = before
        snapshot, collects = Snapshot(before), gc.isenabled()
        self._draws = random_states()
        gc.collect(self._generation)
        # Finalizers that run anywhere would be part of the path.
        gc.disable()
        tracer = sys.gettrace()
        try:
            with ExitStack() as stack:
                stack.enter_context(replaced(builtins.__dict__, {"print": _silent(print)}))
                if self.is_opaque:
                    self._put_opaque(before)
                for space in (vars(time), vars(random), vars(numpy.random), *self._spaces):
                    asked = self._asked_in(space)
                    self._real.append((space, {key: space[key] for key in asked}))
                    stack.enter_context(replaced(space, asked))
                sys.settrace(self._entered)
                try:
                    yield
                finally:
                    sys.settrace(tracer)
        finally:
            snapshot.restore()
            if collects:
                gc.enable()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Enclose what is no part of the capture, and finds modules as they are."""
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            with ExitStack() as stack:
                for space, real in self._real:
                    stack.enter_context(replaced(space, real))
                yield
        finally:
            sys.settrace(tracer)

    def _put_opaque(self, before: Watches) -> None:
        missing = set(self.suspects)
        made: dict[int, Any] = {}
        growing = {id(container) for container, _, name in before.sized() if name in self.suspects}
        for owner, key, value, name in before.places():
            is_list = id(value) in growing
            if name not in self.suspects and not is_list:
                continue
            stand_in = made.get(id(value)) if is_list else None
            stand_in = (
                stand_in
                if stand_in is not None
                else opaque(value, name, self.uses, keeps=self._keeps)
            )
            holder = holder_of(owner, key, value)
            if stand_in is not None and put(owner, key, stand_in):
                made[id(value)] = stand_in
                self._placed.append((holder, owner, key, value))
                missing.discard(name)
        for name in sorted(missing):
            self.uses.texts.append(
                f"{name} is no number that is counted, no list that grows and no tensor that is kept"
            )

    def _asked_in(self, space: dict[str, Any]) -> dict[str, Any]:
        """Return what to put in the place of clocks and of functions that draw in a module."""
        return {
            key: self._asked(value, self._stand_ins[id(value)])
            for key, value in list(space.items())
            if id(value) in self._stand_ins
        }

    def _asked(self, real: Callable[..., Any], drawn: Drawn) -> Callable[..., Any]:
        thread, uses = threading.get_ident(), self.uses

        def asked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or not _is_program(sys._getframe(1).f_code):
                return real(*args, **kwargs)
            if drawn.seeds and args and type(args[0]) is int:
                self._seed(drawn.source)
            is_known = drawn.source in self.seeded or drawn.seeds
            if not self.is_opaque or is_known or not drawn.is_number(args, kwargs):
                return real(*args, **kwargs)
            return OpaqueNumber(drawn.kind, drawn.name, uses)

        return asked

    def _seed(self, source: str) -> None:
        """Take note that what is drawn from now on is the same each time, unless something was drawn before."""
        if random_states()[source] == self._draws[source]:
            self.seeded.add(source)

    def _entered(self, frame: types.FrameType, event: str, argument: Any) -> _Trace | None:
        del event, argument
        code = frame.f_code
        if not _is_program(code) or not _is_asked(frame):
            return None
        frame.f_trace_opcodes = True
        # torch numbers what it makes.
        path = "" if code.co_filename.startswith("<") else code.co_filename
        self._path.update(f"{path}:{code.co_qualname}:{code.co_firstlineno}".encode())
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: Any) -> _Trace:
        del argument
        self._path.update(f"{event[0]}{frame.f_lasti}".encode())
        return self._step

    def not_followed(self, asks: Iterable[str]) -> str | None:
        """Return what was asked for beside stand-ins, or ``None``."""
        seeds = {drawing(source) for source in self.seeded}
        return next((text for text in asks if text not in seeds), None)

    def look_after(self, everything: Callable[[], Watches]) -> None:
        """Look at what the program's code has left, before anybody puts it back.

        Where opaque values lie in other places, what is there changes in some later call, though it did not in this
        one. Where real ones are of another kind than before, later calls may take another course.

        Args:
            everything: returns all values that the model and its code reach now.
        """
        if self.uses.texts:
            return
        if not self.is_opaque:
            self._compare_kinds()
            return
        left = [(owner, key, get(owner, key)) for _, owner, key, _ in self._placed]
        for row in self._placed:
            _put_back(*row)
        places = self._before.places() if self._before is not None else []
        taken = [row for row in places if is_opaque(get(row[0], row[1]))]
        for owner, key, value, _ in taken:
            _put_back(own_space(owner), owner, key, value)
        self.reached = frozenset(name for *_, name in taken)
        try:
            self._is_moved = any(is_opaque(value) for _, _, value, _ in everything().places())
        except UsedError:
            self.uses.texts.clear()
            self._is_moved = True
        self._is_moved = self._is_moved or bool(taken)
        # As torch compares attributes with those of before, too.
        for owner, key, value in left:
            with suppress(LookupError):
                put(owner, key, value)

    def _compare_kinds(self) -> None:
        """Take note of a suspect that is of another kind now, or no value of its own."""
        rows = self._before.places() if self._before is not None else []
        suspects = [row for row in rows if row[3] in self.suspects]
        pairs = [(name, was, get(owner, key)) for owner, key, was, name in suspects]
        before = {id(was) for _, was, _ in pairs if is_kept(was)}
        for name, was, now in pairs:
            if kind_of(was) != kind_of(now) or (is_kept(now) and id(now) in before):
                self.uses.texts.append(f"{name} is of another kind after a call than before")
        kept = [(was, now) for _, was, now in pairs if is_kept(was)]
        same_before = [[one is other for one, _ in kept] for other, _ in kept]
        if same_before != [[one is other for _, one in kept] for _, other in kept]:
            self.uses.texts.append("what is one object after a call was not before")

    def leaked(self) -> bool:
        """Return whether opaque values are left anywhere; ask when all that was captured is gone."""
        if self._is_moved:
            return True
        for generation in (1, 2):
            gc.collect(generation)
            if all(made() is None for made in self.uses.made):
                return False
        return True


def kind_of(value: object) -> object:
    """Return what code that looks at a value by its type, or its parts, finds the same in each call."""
    if type(value) in {int, float}:
        return "number"
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        # In words: to compare sizes that stand for ranges would decide something about them.
        sizes = tuple(map(str, (*value.shape, *strides)))
        return type(value), value.dtype, value.dim(), sizes, value.requires_grad
    if type(value) in {dict, tuple}:
        leaves, structure = pytree.tree_flatten(value)
        return structure, [_kind_of_part(x) for x in leaves]
    return type(value)


def _kind_of_part(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return kind_of(value)
    return value if type(value) in _PLAIN else id(value)


def _put_back(holder: Any, owner: Any, key: Any, value: object) -> None:
    """Put a value where it was; an instance that has got one of its own beside its class's loses that."""
    space = own_space(owner)
    if space is not None and holder is not space and is_opaque(space.get(key)):
        del space[key]
    with suppress(LookupError):  # the list has become shorter since
        put(owner, key, value)


def _is_program(code: types.CodeType) -> bool:
    """Return whether code counts as the program's: not torch's, ours, or what makes log messages."""
    path = code.co_filename
    if is_talk(code) or any(part in path for part in _APART):
        return False
    return origin_of_file(path) not in {Origin.OWN, Origin.TORCH}


def _is_asked(frame: types.FrameType | None) -> bool:
    """Return whether the program calls a function, where that is one of Python's own."""
    while frame is not None:
        origin = origin_of_file(frame.f_code.co_filename)
        if is_talk(frame.f_code):
            return False
        if origin is not Origin.PYTHON:
            return origin not in {Origin.OWN, Origin.TORCH}
        frame = frame.f_back
    return False


def _silent(real: Callable[..., None]) -> Callable[..., None]:
    """Return ``print``, which says nothing in this thread."""
    thread = threading.get_ident()

    def quiet_print(*values: object, **options: Any) -> None:
        if threading.get_ident() != thread:
            real(*values, **options)

    return quiet_print
