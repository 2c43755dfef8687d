"""Run a Python command with this checkout as the installed package, where nothing can be installed.

``passes/``, ``cost_models/`` and ``runtime/`` are installed below ``gascompile``, so the checkout itself is
not importable. ``python3 tools/run_in_place.py -m benchmarks.gpu`` lays out links like the installed package
in ``.in_place`` and runs the rest of its command line with these first on the path, in every process that
the command starts. It needs nothing but the standard library, and no network.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".in_place"


def link_package(tree: Path) -> None:
    """Lay out ``tree`` like a folder that the package is installed in, version included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "gascompile"
    package.mkdir(parents=True)
    for entry in (ROOT / "gascompile").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    folders = project["tool"]["setuptools"]["package-dir"]
    for name, folder in sorted(folders.items()):
        target = tree.joinpath(*name.split("."))
        # A package below one that is linked as a whole is there already.
        if not target.exists():
            target.symlink_to(ROOT / folder)
    version = project["project"]["version"]
    info = tree / f"gascompile-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: gascompile\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")


def environment(tree: Path) -> dict[str, str]:
    """Return this process's environment with the linked package before everything else."""
    others = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(str(part) for part in (tree, ROOT, others) if part)
    # Without the second, the folder that a command is started in would come first again.
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def main() -> None:
    """Replace this process by the command that stands behind the script's name."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} -m MODULE [ARGUMENT ...]")
    link_package(TREE)
    os.chdir(ROOT)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment(TREE))


if __name__ == "__main__":
    main()
