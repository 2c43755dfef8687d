"""Settings of torch in this process that decide what a model's trace is: modes, defaults, backends' flags."""

from __future__ import annotations

import torch
import torch.utils._device
from torch.autograd import forward_ad

from gascompile.core.errors import UnsupportedOpError

_TRACES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
_DEVICE = torch.utils._device.DeviceContext
"""A mode that says where new tensors are, which is part of a plan's key."""
SETTINGS = "settings"
"""Part of a plan's fingerprint: settings of torch under which its ops compute what the model would."""


def torch_settings() -> list[tuple[str, str]]:
    """Return the name and the value of every setting."""
    flags = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "memory efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "nnpack": torch._C._get_nnpack_enabled(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "flush denormal": float(
            torch.full((1,), 1e-310, dtype=torch.float64, device="cpu").mul(1.0)
        )
        == 0.0,
    }
    for device in ("cpu", "cuda"):
        flags[f"autocast {device}"] = torch.is_autocast_enabled(device)
        flags[f"autocast dtype {device}"] = torch.get_autocast_dtype(device)
    return [(name, str(value)) for name, value in flags.items()]


def modes_now() -> list[str]:
    """Return what of the user's is active that sees every op of a trace and its backward pass, in words."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    active = [f"the mode {type(mode).__name__} is active" for mode in modes]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        active.append("hooks on saved tensors are active")
    return active


def traced_by() -> str | None:
    """Return what of the user's sees the ops of a call of now and takes others in their place, in words.

    Calls within it are no calls of a plan: their ops are traced, mapped over rows, or mean something else.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if any(map(torch._C._get_dispatch_mode, _TRACES)):
        return "a trace of torch.fx or torch.export"
    if torch._C._len_torch_function_stack():
        modes = torch.overrides._get_current_function_mode_stack()
        return next((f"the mode {type(m).__name__}" for m in modes if type(m) is not _DEVICE), None)
    return None


def require_followed(*, trains: bool) -> None:
    """Return if a plan of a training step can do now what the step in eager would.

    Raises:
        UnsupportedOpError: something is active around it that no plan follows.
    """
    if trains and torch.is_inference_mode_enabled():
        raise UnsupportedOpError(
            "torch.inference_mode() is active around a step, whose optimizer counts writes; take the step outside of it"
        )
    if (mode := traced_by()) is not None:
        raise UnsupportedOpError(
            f"{mode} is active around a step, which no plan follows; take the step outside of that"
        )


def call_settings() -> tuple[torch.dtype, torch.dtype | None, torch.dtype | None]:
    """Return what decides at the time of a call which types ops compute in: the default, and autocasts' by device."""
    is_enabled = torch.is_autocast_enabled
    return (
        torch.get_default_dtype(),
        torch.get_autocast_dtype("cpu") if is_enabled("cpu") else None,
        torch.get_autocast_dtype("cuda") if is_enabled("cuda") else None,
    )


def has_autocast() -> bool:
    """Return whether ops that are called now cast their arguments."""
    return call_settings()[1:] != (None, None)


def cast_suffix() -> str:
    """Return what a key of something measured on ops has more where they cast their arguments."""
    return f" {settings_now()}" if has_autocast() else ""


def settings_now() -> str:
    """Return ``call_settings`` as they are kept with a plan."""
    default, *autocasts = call_settings()
    casts = [
        f"autocast on {d} to {t}" for d, t in zip(("cpu", "cuda"), autocasts, strict=True) if t
    ]
    return ", ".join((f"the default dtype {default}", *(casts or ("no autocast",))))


PLAIN = "the default dtype torch.float32, no autocast"
"""Settings that nobody has changed; of a plan that does not say."""


def require_castable(weights: str | None) -> None:
    """Return if ops with weights in the form ``weights`` compute what the model would under the settings of now.

    Raises:
        UnsupportedOpError: autocast is on, of which products with packed weights know nothing.
    """
    if weights is not None and has_autocast():
        raise UnsupportedOpError(
            f"weights={weights!r} under torch.autocast: products with packed weights are not cast as the model's are; "
            "compile and call outside of autocast, or leave weights= out"
        )
