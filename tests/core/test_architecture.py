"""The import arrows, the size and character rules, and what an import or a wheel brings along."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INNER = ("passes", "cost_models", "runtime")
SOURCES = sorted(
    path for folder in ("gascompile", *INNER) for path in (ROOT / folder).rglob("*.py")
)
EVERYTHING = SOURCES + sorted(
    path
    for folder in ("tests", "examples", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
)
MAX_LINES = 400
LONGER = {
    "benchmarks/training_traces.py": 410,
    "passes/intervals/schedule.py": 414,  # one walk, of which another overrides steps
}
MAX_FUNCTION_LINES = 50
SOLVERS = {"pulp", "highspy"}
SOLVER_FILE = "gascompile.passes.bounds.linear_program"


def module_name(path: Path) -> str:
    """Return the name under which a source file is installed."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "gascompile" else ["gascompile", *parts])


@dataclass(frozen=True, slots=True)
class Source:
    """What the rules ask of a file; the tree itself, of millions of nodes, would be kept for nothing."""

    imports: tuple[str, ...]
    """Full dotted names, at any depth; not those that only annotations need."""
    functions: tuple[tuple[str, int], ...]
    """Names and lines of bodies."""
    classes: tuple[str, ...]
    """Public ones."""
    unexplained: tuple[str, ...]
    """Numbers at module level without a comment, or a docstring below them."""
    timed_gets: tuple[int, ...]
    """Lines of calls of a ``get`` with a timeout."""


@cache
def source(path: Path) -> Source:
    """Parse a file, once for all rules."""
    names: list[str] = []
    functions: list[tuple[str, int]] = []
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            functions.append((node.name, num_body_lines(node)))
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]
    timed_gets = tuple(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and any(keyword.arg == "timeout" for keyword in node.keywords)
    )
    numbers = tuple(unexplained(tree, text))
    return Source(tuple(names), tuple(functions), tuple(classes), numbers, timed_gets)


def unexplained(tree: ast.Module, text: str) -> Iterator[str]:
    """Yield the names of numbers at module level of which nothing says why they are what they are."""
    lines = ["", *text.splitlines()]
    for node, after in pairwise([*tree.body, ast.Pass()]):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        parts = [n for n in ast.walk(node.value) if isinstance(n, (ast.expr, ast.Constant))]
        kinds = (ast.Constant, ast.BinOp, ast.UnaryOp)
        values = [n.value for n in parts if isinstance(n, ast.Constant)]
        is_number = all(isinstance(n, kinds) for n in parts) and all(
            type(value) in (int, float) for value in values
        )
        has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        is_commented = "#" in lines[node.lineno] or lines[node.lineno - 1].startswith("#")
        if is_number and not has_text and not is_commented:
            yield lines[node.lineno].split()[0]


def imports(path: Path) -> tuple[str, ...]:
    """Return the full dotted name of everything that a file imports, at any depth."""
    return source(path).imports


def room(name: str) -> str:
    """Return the folder of a dotted name, as in ``passes/graph``; '' for other packages."""
    parts = name.split(".")
    if parts[0] != "gascompile":
        return ""
    while len(parts) > 1 and ".".join(parts) not in ROOMS:
        parts.pop()
    return "/".join(parts[1:])


ROOMS = {module_name(path) for path in SOURCES if path.name == "__init__.py"}
# Which top-level room may import which others; every room may import `core`.
ALLOWED = {
    "": {"api", "commands", "training"},
    "api": {
        "", "formats", "cost_models", "passes", "runtime", "report", "weights", "capture", "bundles", "codegen",
        "precision", "machines", "training", "distributed",
    },
    "core": set(),
    "formats": set(),
    "cost_models": {"formats"},
    "passes": {"formats", "cost_models"},
    "runtime": {"formats"},
    "report": {"cost_models", "passes"},
    "weights": {"formats", "bundles"},
    "capture": {"", "formats", "passes", "weights"},
    "bundles": {"formats", "cost_models", "passes", "weights", "capture"},
    "codegen": {"formats", "cost_models", "passes", "runtime", "capture", "bundles"},
    "precision": {"formats", "passes", "weights", "bundles"},
    "machines": {
        "cost_models", "passes", "runtime", "capture", "bundles", "codegen", "api",
    },
    "training": {
        "formats", "cost_models", "passes", "runtime", "report", "weights", "capture", "bundles",
        "codegen", "machines", "distributed",
    },
    "distributed": {"runtime"},
    "integrations": {
        "formats", "cost_models", "passes", "runtime", "weights", "capture", "bundles", "codegen", "machines",
        "training", "api",
    },
}  # fmt: skip


def top(name: str) -> str:
    """Return the top-level room."""
    return room(name).split("/")[0]


def test_import_arrows() -> None:
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in SOURCES
        for name in imports(path)
        if name.split(".")[0] == "gascompile"
        and top(name) not in {"core", own := top(module_name(path))}
        and own in ALLOWED
        and top(name) not in ALLOWED[own]
    ]
    assert wrong == []


def test_no_bare_import_of_an_inner_package() -> None:
    """A bare ``import passes`` would load a second copy of every class."""
    wrong = [
        str(path)
        for path in EVERYTHING
        if {name.split(".")[0] for name in imports(path)} & set(INNER)
    ]
    assert wrong == []


def test_solvers_are_imported_by_one_pass_alone() -> None:
    found = {
        module_name(path)
        for path in SOURCES
        if module_name(path).startswith("gascompile.passes")
        and not SOLVERS.isdisjoint(name.split(".")[0] for name in imports(path))
    }
    assert found == {SOLVER_FILE}


def test_files_are_ascii_and_short() -> None:
    wrong = []
    for path in EVERYTHING:
        text = path.read_text(encoding="utf-8")
        num_lines = text.count("\n")
        if not text.isascii() or num_lines > LONGER.get(str(path.relative_to(ROOT)), MAX_LINES):
            wrong.append(f"{path}: {num_lines} lines, ASCII {text.isascii()}")
    assert wrong == []


def num_body_lines(node: ast.FunctionDef) -> int:
    """Count the lines of the body: what a signature and a docstring take is not complexity."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    wrong = [
        f"{module_name(path)}.{name} has {num_lines} lines"
        for path in SOURCES
        for name, num_lines in source(path).functions
        if num_lines > MAX_FUNCTION_LINES
    ]
    assert wrong == []


def test_numbers_say_what_they_bound_or_measure() -> None:
    wrong = [f"{module_name(path)}.{name}" for path in SOURCES for name in source(path).unexplained]
    assert wrong == []


def test_no_queue_is_waited_for_with_a_timeout() -> None:
    """Before Python 3.13 a ``SimpleQueue``'s ``get(timeout=...)`` waits for ever, if its time is up at a bad moment."""
    assert not [(path, source(path).timed_gets) for path in SOURCES if source(path).timed_gets]


def test_names_of_public_classes_stand_once() -> None:
    counts = Counter(name for path in SOURCES for name in source(path).classes)
    assert [name for name, count in counts.items() if count > 1] == []


def run_python(code: str) -> str:
    """Run code in a fresh interpreter outside the repository; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = "{'pulp', 'highspy', 'kvikio', 'triton', 'transformers', 'accelerate', 'matplotlib'}"


def test_importing_the_package_is_light() -> None:
    code = f"import sys, gascompile; print(sorted({HEAVY} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_importing_the_runtime_loads_no_solver_and_initialises_no_cuda() -> None:
    code = (
        "import sys, pkgutil, importlib, torch, gascompile.runtime as runtime\n"
        "for module in pkgutil.iter_modules(runtime.__path__, 'gascompile.runtime.'):\n"
        "    importlib.import_module(module.name)\n"
        f"loaded = {HEAVY} & set(sys.modules)\n"
        "print(sorted(loaded), 'gascompile.passes' in sys.modules, torch.cuda.is_initialized())"
    )
    assert run_python(code) == "[] False False"


def test_importing_steps_loads_neither_tracer_nor_solver() -> None:
    """A rank that is started again goes on with plans of the cache, and is waited for."""
    code = (
        "import sys, torch, gascompile.training.compile_step\n"
        "tracers = {'torch._functorch.aot_autograd', 'torch.export._trace', 'networkx'}\n"
        f"print(sorted(({HEAVY} | tracers) & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, so that the tree stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ("gascompile", *INNER):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(out), str(source)], check=True, capture_output=True)
    (found,) = out.glob("gascompile-*.whl")
    return found


def test_the_wheel_holds_every_source_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        if path.relative_to(ROOT).parts[0] == "gascompile"
        else f"gascompile/{path.relative_to(ROOT)}"
        for path in SOURCES
    }
    presets = {
        f"gascompile/{path.relative_to(ROOT)}"
        for path in (ROOT / "cost_models" / "presets").rglob("*.json")
    }
    native = {f"gascompile/{p.relative_to(ROOT)}" for p in (ROOT / "runtime").rglob("*.cpp")}
    pages = {"gascompile/report/page.html"}
    assert names == expected | presets | native | pages | {"gascompile/py.typed"}


def test_the_installed_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import gascompile, gascompile.passes, gascompile.runtime, gascompile.cost_models\n"
        "from gascompile.machines.resolve import preset_names\n"
        "print(gascompile.__file__.startswith(sys.path[0]), len(preset_names()))"
    )
    num_presets = len(list((ROOT / "cost_models" / "presets").glob("*.json")))
    assert run_python(code) == f"True {num_presets}"
