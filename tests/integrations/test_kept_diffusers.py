"""Plans of diffusers models are found again by another process, whose sets have another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

_MODEL = """
from diffusers import UNet2DModel
from gascompile.capture.fingerprint.fingerprint import module_print

model = UNet2DModel(
    sample_size=8, layers_per_block=1, block_out_channels=(32,), norm_num_groups=8,
    down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
)
print(module_print(model.eval()).key)
"""


@pytest.mark.slow
def test_a_model_has_one_digest_in_all_processes(root: Path) -> None:
    keys = {
        subprocess.run(
            [sys.executable, "-c", _MODEL], cwd=root, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(keys) == 1
