"""Compiles kernel sources to one shared library; says what machine code made here depends on."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gascompile.core.errors import GASCompileError

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
"""What a source of kernels begins with."""
_TIMEOUT_S = 300.0  # kernels take seconds each; a compiler that hangs is given up
_FIRST_TO_GO = ("sh", "-c", 'echo 1000 2>&- >/proc/self/oom_score_adj; exec "$0" "$@"')
"""Runs a command that the kernel kills before any other where memory runs out: it would kill the largest, this one."""
_CODE_VERSION = "5"
"""Raised where sources or calls change in meaning, so that older kernels are not taken for today's."""


class KernelBuildError(GASCompileError):
    """Kernels could not be compiled: there is no C++ compiler, or it failed."""


class NoCompilerError(KernelBuildError):
    """There is no C++ compiler."""

    def __init__(self) -> None:
        super().__init__(f"there is no C++ compiler '{compiler()}'; install g++, or set CXX")


def has_compiler() -> bool:
    """Return whether the C++ compiler that ``build`` would call is there."""
    return shutil.which(compiler()) is not None


def compiler() -> str:
    """Return the C++ compiler's command."""
    return os.environ.get("CXX", "g++")


def built_for() -> dict[str, str]:
    """Return what kernels that are compiled here depend on."""
    return {
        "code": _CODE_VERSION,
        "torch": str(torch.__version__),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_features(),
    }


def processor_features() -> str:
    """Return a digest of the processor's instruction sets; a compiler may use any of them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    line = next((x for x in lines if x.lower().startswith(("flags", "features"))), "")
    features = " ".join(sorted(line.partition(":")[2].split()))
    return hashlib.blake2b(features.encode(), digest_size=8).hexdigest()


def build(sources: Sequence[str]) -> bytes:
    """Return the shared library of C++ sources: one compilation, as most of it is reading headers.

    Raises:
        NoCompilerError: there is no compiler.
        KernelBuildError: it failed.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.exc import InvalidCxxCompiler

    with tempfile.TemporaryDirectory(prefix="gascompile-kernels-") as folder:
        source = Path(folder) / "kernels.cpp"
        source.write_text("\n".join((HEADER, *sources)), encoding="utf-8")
        try:
            with config.patch({"cpp.vec_isa_ok": True, "cpp.cxx": (compiler(),)}):
                # Integers wrap around, as torch's do; to a C++ compiler they never overflow. Zeros have signs.
                flags = ["-w", "-fwrapv", "-fsigned-zeros"]
                options = CppTorchOptions(
                    vec_isa=pick_vec_isa(), warning_all=False, extra_flags=flags
                )
                command = CppBuilder(
                    name="kernels",
                    sources=str(source),
                    BuildOption=options,
                    output_dir=folder,
                ).get_command_line()
        except InvalidCxxCompiler as error:
            raise NoCompilerError from error
        _run(shlex.split(command), folder)
        return (Path(folder) / "kernels.so").read_bytes()


def compile_library(
    source: str, *, libraries: Sequence[str] = (), flags: Sequence[str] = ("-O2",)
) -> bytes:
    """Return the shared library of a C++ source that may use torch's headers.

    Args:
        source: the C++ text.
        libraries: those of torch's that it is linked with.
        flags: of the compiler.

    Raises:
        NoCompilerError: there is no compiler.
        KernelBuildError: it failed.
    """
    if not has_compiler():
        raise NoCompilerError
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="gascompile-library-") as folder:
        path = Path(folder) / "library.cpp"
        path.write_text(source, encoding="utf-8")
        command = [compiler(), *flags, "-shared", "-fPIC", "-std=c++20"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-I{torch_folder / 'include'}", str(path), f"-L{torch_folder / 'lib'}"]
        command += [*(f"-l{name}" for name in libraries), "-o", "library.so"]
        _run(command, folder)
        return (Path(folder) / "library.so").read_bytes()


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(
            [*_FIRST_TO_GO, *command],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"'{command[0]}' took more than {_TIMEOUT_S:.0f} s") from error
    # g++ says so of the program it calls; of itself nobody but its parent can.
    if done.returncode == -signal.SIGKILL or "Killed signal" in done.stderr:
        raise KernelBuildError(
            f"'{command[0]}' was killed, probably as memory ran out; it takes about 400 MB beside this process"
        )
    if done.returncode:
        first = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr[:200])
        raise KernelBuildError(f"'{command[0]}' failed: {first.strip()}")
