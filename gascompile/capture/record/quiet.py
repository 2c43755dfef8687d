"""Quiet: torch's own operators run without the profile that sees the model's code."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file
from gascompile.capture.record.call_digest import CallDigest
from gascompile.core.deferral import safe_point
from gascompile.core.own_ops import OWN_OPS

_TORCHS = {"aten", "prim", "prims", "prologue", "inductor", "quantized", "_c10d_functional"}
_QUIET = _TORCHS | OWN_OPS.keys()
"""Spaces of names whose ops run no code of the program: torch's and ours."""


class Quiet(TorchFunctionMode):
    """Switches the profile off while torch works by itself."""

    def __init__(
        self,
        profile: Callable[..., None],
        ran: Callable[[types.CodeType, dict[str, Any]], None],
        answer: Callable[[object, tuple[Any, ...]], tuple[object] | None],
        digest: CallDigest | None,
    ) -> None:
        """Switch to ``profile`` and back; tell ``ran`` of code, ask ``answer`` first, and tell ``digest`` of calls."""
        super().__init__()
        self._profile, self._ran, self._answer, self._digest = profile, ran, answer, digest

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if (told := self._answer(func, args)) is not None:
            return told[0]
        # What torch's own compiler follows, as a branch of torch.cond, is called again as an op with functions.
        digest = None if torch.compiler.is_dynamo_compiling() else self._digest
        if _calls_back(func, types, args, kwargs):
            if digest is not None:
                digest.lose()
            return func(*args, **kwargs)
        sys.setprofile(None)
        if isinstance(func, FunctionType):
            self._ran(func.__code__, func.__globals__)
        try:
            safe_point()
            if digest is None:
                return None if _changes_nothing(func, args) else func(*args, **kwargs)
            digest.calls(func, args, kwargs)
            returned = None if _changes_nothing(func, args) else func(*args, **kwargs)
            digest.returns(returned)
            return returned
        finally:
            sys.setprofile(self._profile)


def profile_again(before: Any) -> None:
    """Give the profile back to whom it was taken from: a function, or a profiler that is no function."""
    is_function = before is None or callable(before)
    sys.setprofile(before if is_function else None)
    if not is_function:
        before.enable()


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether gradients are switched to what they are: an export would cut its graph there, and join it."""
    return func is torch._C._set_grad_enabled and args == (torch.is_grad_enabled(),)


def _calls_back(
    func: Callable[..., Any],
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> bool:
    """Return whether code of the program may run inside an operator."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        space = str(func).partition(".")[0].partition("::")[0]
        return space not in _QUIET
    if isinstance(func, torch._ops.HigherOrderOperator):
        return True
    if any(origin_of_type(kind) is not Origin.TORCH for kind in types):
        return True
    return any(callable(v) for v in (*args, *kwargs.values())) or not _is_torch(func)


def _is_torch(func: Callable[..., Any]) -> bool:
    code = getattr(func, "__code__", None)
    return code is None or origin_of_file(code.co_filename) is Origin.TORCH


@cache
def origin_of_type(kind: type) -> Origin:
    """Return where a class was written."""
    if (kind.__module__ or "").partition(".")[0] == "torch":
        return Origin.TORCH
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return origin_of_file(path) if isinstance(path, str) else Origin.USER
