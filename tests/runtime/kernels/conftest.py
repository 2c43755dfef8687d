"""Where the kernels of these tests run: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return each device that the kernels of this process can run on."""
    from gascompile.runtime.kernels.launching import INTERPRETED

    found = torch.device(request.param)
    if found.type == "cpu" and not INTERPRETED:
        pytest.skip("kernels are compiled here; the same tests run on the GPU")
    return found
