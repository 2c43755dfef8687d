"""Spoilt files of every format end in a typed error or a right result, within bounds, and touch nothing else.

``GASCOMPILE_FUZZ_RUNS`` is the number of cases, ``GASCOMPILE_FUZZ_FIRST`` the first: case ``n`` is always the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.seeds import make_seeds

RUNS = int(os.environ.get("GASCOMPILE_FUZZ_RUNS", "300"))
FIRST = int(os.environ.get("GASCOMPILE_FUZZ_FIRST", "0"))
_PER_PROCESS = 5000


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds") / "all"
    make_seeds(folder)
    return folder


@pytest.mark.timeout(0 if RUNS > _PER_PROCESS else 600)
def test_spoilt_files(seeds: Path, root: Path) -> None:
    counts: Counter[str] = Counter()
    problems = []
    for begin in range(FIRST, FIRST + RUNS, _PER_PROCESS):
        end = min(begin + _PER_PROCESS, FIRST + RUNS)
        found = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.worker", str(seeds), str(begin), str(end)],
            capture_output=True, text=True, check=False, cwd=root,
        )  # fmt: skip
        lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
        problems += [line for line in lines if "case" in line]
        if found.returncode or not lines or "counts" not in lines[-1]:
            last = found.stderr.rpartition("#")[2][:2000]
            problems.append({"case": last, "problem": f"the process ended with {found.returncode}"})
            continue
        counts.update(lines[-1]["counts"])
    print(json.dumps(dict(sorted(counts.items())), indent=1))
    assert not problems, problems[:5]
    assert sum(counts.values()) == RUNS
    refused = sum(n for kind, n in counts.items() if kind.endswith("Error"))
    assert RUNS * 0.5 < refused < RUNS, "some cases do no harm, and most do"
