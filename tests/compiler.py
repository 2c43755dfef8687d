"""A C++ compiler that remembers: what was compiled once is copied, for all workers and what they start.

Commands that read the same sources with the same flags give the same library; folders may differ. It lives as
long as one run of the tests, so nothing comes from an earlier one.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_SCRIPT = """#!{python} -IS
import fcntl, hashlib, os, shutil, sys

compiler, kept, here, args = {compiler!r}, {kept!r}, os.getcwd(), sys.argv[1:]
if "-o" not in args:
    os.execv(compiler, [compiler, *args])
target = args[args.index("-o") + 1]
digest = hashlib.sha256("\\0".join(args).replace(here, ".").encode())
for name in args:
    if name.endswith((".cpp", ".c", ".o")):
        with open(name, "rb") as file:
            digest.update(file.read().replace(here.encode(), b"."))
path = os.path.join(kept, digest.hexdigest())
with open(path + ".lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not os.path.exists(path):
        code = os.spawnv(os.P_WAIT, compiler, [compiler, *args])
        if code:
            sys.exit(code if code > 0 else 1)
        shutil.copyfile(target, path + ".new")
        os.replace(path + ".new", path)
shutil.copyfile(path, target)
os.chmod(target, 0o755)
"""


def remembering_compiler(compiler: str, folder: Path) -> Path | None:
    """Return a command that calls ``compiler`` once per source; ``None`` where there is none.

    Args:
        compiler: command or path.
        folder: shared by all that are to compile once.
    """
    found = shutil.which(compiler)
    if found is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    # Tools tell compilers apart by their names.
    path = folder / Path(found).name
    text = _SCRIPT.format(python=sys.executable, compiler=found, kept=str(folder))
    new = folder / f"{path.name}.{os.getpid()}"
    new.write_text(text)
    new.chmod(0o755)
    new.replace(path)
    return path
