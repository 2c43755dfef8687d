"""Settings of torch in this process that decide what a model's trace is: modes, defaults, backends' flags."""

from __future__ import annotations

import torch


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
        "flush denormal": torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item() == 0.0,
    }
    for device in ("cpu", "cuda"):
        flags[f"autocast {device}"] = torch.is_autocast_enabled(device)
        flags[f"autocast dtype {device}"] = torch.get_autocast_dtype(device)
    return [(name, str(value)) for name, value in flags.items()]
