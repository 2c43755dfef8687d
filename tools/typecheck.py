"""Run mypy over every source file as it is installed, and fail when it looked at fewer.

``passes/``, ``cost_models/`` and ``runtime/`` are installed below ``gascompile``, so mypy started in the
root does not find them and reports success after a quarter of the code. It is run in ``.typecheck``
instead: a folder of links laid out like the installed package.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".typecheck"
SUBPACKAGES = ("passes", "cost_models", "runtime")
BESIDE = ("tests", "examples", "benchmarks", "tools")
_SUMMARY = re.compile(r"(?:checked|no issues found in) (\d+) source files?")


def link_tree() -> None:
    """Lay out ``.typecheck`` like the installed package; mypy's cache in it is kept."""
    package = TREE / "gascompile"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in (ROOT / "gascompile").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for name in SUBPACKAGES:
        (package / name).symlink_to(ROOT / name)
    for name in BESIDE:
        (TREE / name).unlink(missing_ok=True)
        (TREE / name).symlink_to(ROOT / name)


def num_sources() -> int:
    """Return how many Python files the repository holds in its source folders."""
    folders = ("gascompile", *SUBPACKAGES, *BESIDE)
    return sum(1 for folder in folders for _ in (ROOT / folder).rglob("*.py"))


def main() -> int:
    """Return mypy's exit status, or 1 when it did not check every file."""
    link_tree()
    expected = num_sources()
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    targets = ["gascompile", *(name for name in BESIDE if any((ROOT / name).rglob("*.py")))]
    done = subprocess.run(
        [*command, *targets], cwd=TREE, capture_output=True, text=True, check=False
    )
    output = re.sub(
        rf"^gascompile/(?=(?:{'|'.join(SUBPACKAGES)})/)", "", done.stdout, flags=re.MULTILINE
    )
    sys.stdout.write(output)
    sys.stderr.write(done.stderr)
    found = _SUMMARY.search(done.stdout)
    checked = int(found.group(1)) if found else 0
    if checked != expected:
        sys.stderr.write(f"mypy checked {checked} of {expected} source files\n")
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
