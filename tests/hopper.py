"""What Triton compiles for a Hopper GPU, in another process, because the kernels of this one may be interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compiled_by(module: str, *arguments: str, cache: Path, root: Path) -> list[dict[str, Any]]:
    """Run a module that compiles kernels; return what it says of each.

    Args:
        module: prints one JSON object per kernel.
        arguments: of the module.
        cache: an empty folder for Triton.
        root: of the repository.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
