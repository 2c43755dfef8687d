"""Asked settings: switches of torch that a model's own code asks for while it is captured.

A plan is for calls in which they are as they were. One of them no plan can follow: whether gradients are recorded, as
planned runs record none. There the capture is made again with the other answer, see ``capture.export``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.backends import ContextProp, cudnn, mkldnn

from gascompile.core.errors import CaptureError

Program = Callable[[FrameType | None], object]
"""Says whose frame a call comes from; ``None`` where that is no code of the model's."""
GRADIENTS = "torch.is_grad_enabled()"
FASTPATH = "torch.backends.mha.get_fastpath_enabled()"
_CALLED: dict[str, Callable[[], object]] = {
    f"{function.__module__}.{function.__name__}()".replace("torch._C.", "torch."): function
    for function in (
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        torch.is_anomaly_enabled,
        torch.is_autocast_cache_enabled,
        torch.get_num_threads,
        torch.get_num_interop_threads,
        torch.are_deterministic_algorithms_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
        torch.get_deterministic_debug_mode,
        torch.get_float32_matmul_precision,
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.mha.get_fastpath_enabled,
        torch.random.initial_seed,
    )
}
_FLAGS: dict[str, Callable[[], object]] = {
    f"torch.backends.{name}.{key}": flag.getter
    for name, backend in (("mkldnn", mkldnn), ("cudnn", cudnn))
    for key, flag in vars(type(backend)).items()
    if isinstance(flag, ContextProp)
}
_SEED = "torch.random.initial_seed()"
SETTINGS = {**_CALLED, **_FLAGS}
"""What a setting is now, by the words for it."""
_BY_FUNCTION = {id(function): name for name, function in SETTINGS.items()}
_BY_CODE = {
    id(function.__code__): name
    for name, function in _CALLED.items()
    if isinstance(function, FunctionType)
}
_FLAG_CODE = ContextProp.__get__.__code__
OF_CALLS = frozenset({GRADIENTS, "torch.is_inference_mode_enabled()"})
"""Those that say nothing of a training step, which sets them itself."""


def setting_called(function: object) -> str | None:
    """Return which setting a function of torch's in C tells."""
    if getattr(function, "__self__", None) is torch.default_generator:
        return _SEED if getattr(function, "__name__", "") == torch.initial_seed.__name__ else None
    return _BY_FUNCTION.get(id(function))


def setting_entered(frame: FrameType) -> str | None:
    """Return which setting is asked for where ``frame`` begins."""
    if frame.f_code is _FLAG_CODE:
        return _BY_FUNCTION.get(id(getattr(frame.f_locals.get("self"), "getter", None)))
    return _BY_CODE.get(id(frame.f_code))


class AskedSetting:
    """What a setting is, as an attribute: the same object as long as nobody sets it."""

    def __init__(self, name: str) -> None:
        """Look at a setting by its name."""
        self._now, self._was = SETTINGS[name], SETTINGS[name]()

    @property
    def value(self) -> object:
        """Return it."""
        now = self._now()
        return self._was if now == self._was else now


def require_as_told(told: Mapping[str, object], who: str) -> None:
    """Return if what a capture was told of settings is so at the calls, too.

    Raises:
        CaptureError: the capture itself, or the model, has set one.
    """
    for name, answer in told.items():
        now = SETTINGS[name]()
        if name != GRADIENTS and now != answer:
            raise CaptureError(
                f"{who} asks for {name}, which is {answer!r} within a capture and {now!r} around it. What to do: ask "
                "for it before compiling, and keep the answer in an attribute"
            )


@contextmanager
def as_if_recording(spaces: Iterable[dict[str, Any]], program: Program) -> Iterator[None]:
    """Tell the model's code in this thread that gradients are recorded.

    Args:
        spaces: globals of code that may have the function that says so under names of its own.
        program: tells that code from torch's.
    """
    real, thread = torch.is_grad_enabled, threading.get_ident()

    def is_grad_enabled() -> bool:
        return real() or (threading.get_ident() == thread and program(sys._getframe(1)) is not None)

    with ExitStack() as stack:
        for space in (vars(torch), *spaces):
            names = [key for key, value in list(space.items()) if value is real]
            stack.enter_context(replaced(space, dict.fromkeys(names, is_grad_enabled)))
        yield


@contextmanager
def replaced(space: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Put values into a module for a time."""
    before = {key: space[key] for key in values}
    space.update(values)
    try:
        yield
    finally:
        space.update(before)
