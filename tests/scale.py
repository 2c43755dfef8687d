"""How many cases random tests go through: few by default, ``GASCOMPILE_SCALE`` times as many where there is time."""

from __future__ import annotations

import os

SCALE = int(os.environ.get("GASCOMPILE_SCALE", "1"))
