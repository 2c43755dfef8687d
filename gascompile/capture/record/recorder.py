"""Recorder: which code runs while a model is captured, and what it asks of the world outside the program.

A profile function sees every call of the model's code. What happens inside torch's operators is no code of
the model's and would cost as much as the capture itself, so a torch function mode switches the profile off
in there; where an operator calls back (hooks of tensors, custom ops, higher-order ops), it stays on.
"""

from __future__ import annotations

import enum
import gc
import importlib
import inspect
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gascompile.capture.fingerprint.audit import heard, listen
from gascompile.capture.fingerprint.code_origin import Origin
from gascompile.capture.record.asked_inputs import (
    ASKING,
    OF_GRADIENTS,
    PARAMETER,
    AskedInputs,
)
from gascompile.capture.record.asked_settings import (
    FASTPATH,
    GRADIENTS,
    OF_CALLS,
    SETTINGS,
    setting_called,
    setting_entered,
)
from gascompile.capture.record.call_digest import CallDigest
from gascompile.capture.record.callers import (
    caller_of,
    collects,
    name_of_weights,
    opener_of,
)
from gascompile.capture.record.draws import all_random_states
from gascompile.capture.record.library_values import FirstSeen
from gascompile.capture.record.quiet import Quiet, origin_of_type, profile_again

_CLOCKS = {
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "localtime", "gmtime",
    "ctime", "asctime", "strftime", "now", "today", "utcnow",
}  # fmt: skip
_DISK = {
    "stat", "lstat", "listdir", "scandir", "access", "getcwd", "readlink", "read", "readv", "pread", "preadv",
}  # fmt: skip
_PROCESS = {
    "getpid", "getppid", "get_ident", "uname", "gethostname", "sched_getaffinity", "getrlimit", "umask",
}  # fmt: skip
_ANEW = {
    "urandom": "draws random bytes of the system",
    "start_new_thread": "starts a thread, in which nothing can be followed,",
}
_ASKS = {
    **dict.fromkeys(_CLOCKS, "reads the clock"),
    **dict.fromkeys(_DISK, "looks at the disk"),
    **dict.fromkeys(_PROCESS, "asks for what differs in every process"),
    "connect": "opens what others may change",
    **_ANEW,
}
_ASKED_IN = (
    "time", "datetime", "posix", "nt", "os", "_thread", "_socket", "_random", "resource", "_sqlite3",
)  # fmt: skip
_SETS = {"manual_seed", "seed", "set_state", "graphsafe_set_state"}  # methods of generators
_ON_NODES = {"register_hook", "register_prehook"}  # methods of what autograd runs
_OF_WEIGHTS = {"get_tensor", "get_tensors", "get_slice"}  # methods of an open file of safetensors
_METHODS = ("/torch/_tensor.py", "/torch/overrides.py")
_WRAPS = ("/torch/_dynamo/", "/torch/_compile.py")
"""What lies around some of torch's functions once its compiler is loaded."""


def drawing(source: str) -> str:
    """Return in words that a capture draws."""
    return f"it draws {source}"


class Ask(enum.Enum):
    """How what a capture asks of the world beside the program differs from call to call."""

    CLOCK = "a look at the clock, which a trial stands in for"
    DRAW = "random numbers of Python's or NumPy's, which a trial stands in for"
    ANEW = "another answer at each call"
    ELSEWHERE = "another answer in another process, or when somebody changes it"


class Running:
    """What ran: the frames' code with its globals, and what it asked for beside the program."""

    def __init__(self) -> None:
        self.code: dict[tuple[int, int], tuple[types.CodeType, dict[str, Any]]] = {}
        """By identity; the objects are kept so that no other takes their place."""
        self.first_seen = FirstSeen()
        self.environment: dict[str, str | None] = {}
        self.files: set[str] = set()
        self.written: set[str] = set()
        self.modules: set[str] = set()
        """Imported by a name that stands in no import statement, or for the first time."""
        self.imported: set[str] = set()
        """Imported for the first time."""
        self.asked: dict[str, Ask] = {}
        """Why another run may capture something else, in words."""
        self.backward: dict[str, None] = {}
        """Code of the program that is to run in the backward pass, which no kept plan is compared with, in words."""
        self.calls_back = False
        """Whether something is to run in Python in the backward pass, torch's own or the program's."""
        self.settings: dict[str, object] = {}
        """Of torch's, what the program asks for, with what it was told."""
        self.asks_past = False
        """Whether it asks torch itself where it was to be told that gradients are recorded."""
        self.inputs: AskedInputs | None = None
        """Of the call that is captured; ``None`` where nobody follows them."""
        self.packed: dict[str, None] = {}
        """Where hooks on saved tensors were set, of which a trace of the backward pass knows nothing."""
        self.sizes: dict[str, None] = {}
        """Where the text or the type of a size counts, in words."""
        self.nests = False
        """Whether a ``nn.TransformerEncoder`` may pack what is padded, if calls record no gradients."""
        self.digest: CallDigest | None = None
        """Of what the program has torch compute; ``None`` where nobody asks."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enclose a capture: what it draws and imports shows in what differs after it."""
        draws, loaded = all_random_states(), set(sys.modules)
        yield
        for name, state in all_random_states().items():
            if state != draws[name]:
                self.asked[drawing(name)] = Ask.DRAW
        self._look_again()
        self.imported |= sys.modules.keys() - loaded
        self.modules |= self.imported

    def _look_again(self) -> None:
        """Note what the program itself may have changed outside, and read."""
        for key, value in self.environment.items():
            if variable(key) != value:
                self.asked[f"it changes the environment variable {key}"] = Ask.ANEW
        looks = any(kind is Ask.ELSEWHERE for kind in self.asked.values())
        for path in sorted(self.written):
            if looks or path in self.files:
                self.asked[f"it writes the file {path}, which it may read"] = Ask.ANEW

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Take note of what runs on this thread."""
        listen()
        before, profile = sys.getprofile(), self._seen
        with Quiet(profile, self.ran, self.answer, self.digest):
            outer, _active.running = _active.running, self
            sys.setprofile(profile)
            try:
                yield
            finally:
                profile_again(before)
                _active.running = outer

    def _seen(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if gc.callbacks and collects(frame.f_code):
                return
            self.ran(frame.f_code, frame.f_globals)
            handler = _HANDLERS.get(id(frame.f_code))
            if handler is not None:
                handler(self, frame)
            elif (setting := setting_entered(frame)) is not None:
                self._asks_setting(setting, frame.f_back)
        elif event == "c_call":
            name = argument.__name__
            if name in _SETS and isinstance(argument.__self__, torch.Generator):
                self._sets(frame, name)
            elif name in _ASKS and _module_of(argument) in _ASKED_IN:
                self._asks(frame, _ASKS[name], name)
            elif name == "apply":
                self.applies(argument.__self__)
            elif name in _ON_NODES:
                self._hooks_from(frame)
            elif name in _OF_WEIGHTS and type(argument.__self__).__name__ == "safe_open":
                # Nobody is told when it is opened, and it does not say what it is of.
                self.opens(name_of_weights(frame), frame, reads=True)
            elif (setting := setting_called(argument)) is not None:
                self._asks_setting(setting, frame)

    def _asks_setting(self, name: str, frame: types.FrameType | None) -> None:
        if (self.inputs is not None or name not in OF_CALLS) and caller_of(frame) is not None:
            self.settings.setdefault(name, SETTINGS[name]())
            is_told = self.inputs is not None and self.inputs.is_recording
            self.asks_past = self.asks_past or (name == GRADIENTS and is_told)

    def answer(self, func: object, args: tuple[Any, ...]) -> tuple[object] | None:
        """Return in a tuple what the model's code is told of an input; ``None`` where the substitute may say it."""
        if self.inputs is None or not args or (name := ASKING.get(func)) is None:
            return None
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith(_METHODS):
            frame = frame.f_back
        if caller_of(frame) is None:
            return None
        if name in OF_GRADIENTS and not self.inputs.knows(args[0]):
            self.settings[GRADIENTS] = False
        answered = self.inputs.answer(name, args[0])
        if self.inputs.own_facts:
            self.asked["asks for more of parameters than their shapes"] = Ask.ELSEWHERE
        return answered

    def checks_instance(self, frame: types.FrameType) -> None:
        """Note that the model's code asks whether an input is a parameter."""
        if self.inputs is not None and caller_of(frame.f_back) is not None:
            self.inputs.answer(PARAMETER, frame.f_locals.get("instance"))

    def ran(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """Take note of code."""
        key = (id(code), id(space))
        if key not in self.code:
            self.code[key] = (code, space)
            self.first_seen.note(code, space)

    def _asks(self, frame: types.FrameType, what: str, name: str) -> None:
        caller = caller_of(frame)
        if caller is not None:
            is_anew = name in _ANEW or name == "seed"
            kind = Ask.CLOCK if name in _CLOCKS else Ask.ANEW if is_anew else Ask.ELSEWHERE
            self.asked[f"{caller.f_code.co_qualname} {what} ({name})"] = kind

    def reseeds(self, frame: types.FrameType) -> None:
        """Note that the model's code sets the random numbers to come; torch's, as of checkpoints, are followed."""
        caller = frame.f_back
        while caller is not None and any(part in caller.f_code.co_filename for part in _WRAPS):
            caller = caller.f_back
        self._sets(caller, frame.f_code.co_name)

    def _sets(self, frame: types.FrameType | None, name: str) -> None:
        caller = caller_of(frame)
        if caller is not None:
            what = f"{caller.f_code.co_qualname} sets torch's random numbers to come ({name})"
            self.asked[what] = Ask.ANEW

    def reads_variable(self, frame: types.FrameType) -> None:
        """Note an environment variable that the model's code reads, here with its value."""
        key = frame.f_locals.get("key")
        if isinstance(key, (str, bytes)) and caller_of(frame.f_back) is not None:
            self.environment.setdefault(os.fsdecode(key), variable(os.fsdecode(key)))

    def reads_variables(self, frame: types.FrameType) -> None:
        """Note that the model's code goes over all environment variables."""
        if caller_of(frame.f_back) is not None:
            self.asked["reads all environment variables"] = Ask.ELSEWHERE

    def imports(self, frame: types.FrameType) -> None:
        """Note a module that is imported by a computed name."""
        name = frame.f_locals.get("name")
        if isinstance(name, str) and caller_of(frame.f_back) is not None:
            package = frame.f_locals.get("package")
            if name.startswith(".") and isinstance(package, str):
                level = len(name) - len(name.lstrip("."))
                name = f"{package.rsplit('.', level - 1)[0]}.{name.lstrip('.')}"
            self.modules.add(name)

    def seeds(self, frame: types.FrameType) -> None:
        """Note random numbers whose seed nobody gave."""
        if frame.f_locals.get("a") is None:
            self._asks(frame, "seeds random numbers by the clock", "seed")

    def hooks(self, frame: types.FrameType) -> None:
        """Note a hook on a gradient, by the frame of what sets it."""
        self._hooks_from(frame.f_back)

    def _hooks_from(self, frame: types.FrameType | None) -> None:
        self.calls_back = True
        if (caller := caller_of(frame)) is not None:
            self.backward[f"{caller.f_code.co_qualname} hooks into the backward pass"] = None

    def packs(self, frame: types.FrameType) -> None:
        """Note hooks on what is saved for the backward pass, but for torch's own, which change no values."""
        caller = caller_of(frame.f_back)
        if caller is not None:
            self.packed[caller.f_code.co_qualname] = None

    def shows_size(self, frame: types.FrameType) -> None:
        """Note that the model's code wants a size in words."""
        caller = caller_of(frame.f_back)
        if caller is not None:
            self.sizes[f"{caller.f_code.co_qualname} puts a size into words"] = None

    def asks_type(self, frame: types.FrameType | None) -> None:
        """Note that the model's code looks whether a size is a number of Python's."""
        caller = caller_of(frame)
        if caller is not None:
            self.sizes[f"{caller.f_code.co_qualname} asks whether a size is an int"] = None

    def encodes(self, frame: types.FrameType) -> None:
        """Note an encoder of torch's that takes values of a mask to decide by, but not in a capture."""
        given = frame.f_locals
        module, is_padded = given["self"], given.get("src_key_padding_mask") is not None
        if is_padded and given.get("mask") is None and getattr(module, "use_nested_tensor", False):
            self.settings.setdefault(FASTPATH, SETTINGS[FASTPATH]())
            is_fast = bool(self.settings[FASTPATH]) and not torch.is_autocast_enabled("cpu")
            self.nests = self.nests or (is_fast and not module.layers[0].training)

    def applies(self, by: object) -> None:
        """Note a function with a backward pass of its own, told by its class or by the frame of its ``apply``."""
        kind: Any = by.f_locals.get("cls") if isinstance(by, types.FrameType) else by
        is_function = isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
        if is_function and not kind.__name__.startswith("GeneratedBackwardFor_gascompile_ranks"):
            self.calls_back = True
            if origin_of_type(kind) is not Origin.TORCH:
                self.backward[f"{kind.__qualname__} has a backward pass of its own"] = None

    def opens(self, path: object, frame: types.FrameType, *, reads: bool) -> None:
        """Note a file that the model's code opens."""
        if opener_of(frame) is None:
            return
        if not isinstance(path, (str, bytes, os.PathLike)):
            if reads:
                self.asked["reads an open file"] = Ask.ANEW
            return
        name = os.path.abspath(os.fsdecode(path))
        (self.files if reads else self.written).add(name)
        if reads and os.path.exists(name) and not os.path.isfile(name):
            self.asked[f"reads {name}, which is no file,"] = Ask.ANEW


def _module_of(argument: Any) -> str:
    owner = getattr(argument, "__self__", None)
    kind = owner if isinstance(owner, type) else type(owner)
    return owner.__name__ if isinstance(owner, types.ModuleType) else kind.__module__


def variable(key: str) -> str | None:
    """Return an environment variable without being seen to read it."""
    raw: dict[object, Any] = os.environ._data  # type: ignore[attr-defined]  # unseen by the profile
    content = raw.get(os.environ.encodekey(key))
    return None if content is None else os.fsdecode(content)


class _Active(threading.local):
    running: Running | None = None


_active = _Active()


def _opened(arguments: tuple[Any, ...]) -> None:
    """See a file that is opened: a profile function is not told which."""
    if _active.running is None:
        return
    path, mode, flags = arguments
    writes = mode is None and flags & (os.O_WRONLY | os.O_RDWR)
    only_writes = isinstance(mode, str) and "r" not in mode and "+" not in mode
    _active.running.opens(path, sys._getframe(2), reads=not writes and not only_writes)


heard.opened = _opened


_HANDLERS: dict[int, Callable[[Running, types.FrameType], None]] = {
    id(function.__code__): handler
    for function, handler in (
        (type(os.environ).__getitem__, Running.reads_variable),
        (type(os.environ).__iter__, Running.reads_variables),
        (type(os.environ).__repr__, Running.reads_variables),
        (type(os.environ).copy, Running.reads_variables),
        (importlib.import_module, Running.imports),
        (random.Random.seed, Running.seeds),
        (type(torch.nn.Parameter).__instancecheck__, Running.checks_instance),
        (torch.random.manual_seed, Running.reseeds),
        (torch.random.seed, Running.reseeds),
        (torch.random.set_rng_state, Running.reseeds),
        (inspect.unwrap(torch.random.fork_rng), Running.reseeds),
        (torch.Tensor.register_hook, Running.hooks),
        (torch.Tensor.register_post_accumulate_grad_hook, Running.hooks),
        (torch.autograd.graph.saved_tensors_hooks.__init__, Running.packs),
        (torch.nn.TransformerEncoder.forward, Running.encodes),
        (torch.SymInt.__repr__, Running.shows_size),
        # From torch 2.14 on it is no Python's: ``_seen`` knows it by its name.
        (getattr(torch.autograd.Function.apply, "__func__", None), Running.applies),
    )
    if function is not None
}
