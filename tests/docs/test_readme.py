"""What the documentation shows works: code and commands run, links and names lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from examples import demo_model, generate
from gascompile.cli import app
from tests.docs.pages import Block, anchors, blocks, defined, links, names, paths

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
]
# What the README does with models of 181 and 64 MiB is done with some of 7 and 16 MiB here.
_SMALLER = {
    "64MiB": "4MiB",
    "24MiB": "6MiB",
    "nn.Linear(1024, 1024)": "nn.Linear(512, 512)",
    "torch.randn(4, 1024)": "torch.randn(4, 512)",
    "--max-length 256": "--max-length 96",
}
_NOT_RUN = ("make", "pip", ".")


def _small(code: str) -> str:
    for large, small in _SMALLER.items():
        code = code.replace(large, small)
    return code


def _command(line: str) -> None:
    """Run a line of a shell block in this process; fail on a non-zero exit."""
    words = shlex.split(_small(line), comments=True)
    if not words or words[0] in _NOT_RUN:
        return
    if words[:3] == ["python", "-m", "examples.generate"]:
        assert generate.main(words[3:]) == 0, line
        return
    assert words[0] == "gascompile", (
        f"the README shows a command that this test does not know: {line}"
    )
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}{done.exception!r}"


def _run(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    if block.language == "python":
        # Blank lines keep the line numbers of the page in tracebacks.
        code = "\n" * block.line + _small(block.code)
        exec(compile(code, str(page), "exec"), namespace)
    elif block.language == "sh":
        for line in block.code.splitlines():
            _command(line)


def _run_pages(*names: str) -> dict[str, Any]:
    """Run what pages show, one after the other; return what they leave behind."""
    namespace: dict[str, Any] = {}
    for name in names:
        for block in blocks(ROOT / name):
            _run(block, ROOT / name, namespace)
    return namespace


@pytest.mark.slow
def test_the_code_and_the_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(folder: Path) -> int:
        return demo_model.make_demo(folder, width=192, num_layers=3)

    monkeypatch.setattr(generate, "make_demo", small)
    # The commands list and measure; the other tests' cache is none of their business.
    monkeypatch.setenv("GASCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    namespace = _run_pages(
        "README.md", "docs/how-it-works.md", "docs/explaining-a-plan.md", "docs/weight-forms.md"
    )
    printed = capsys.readouterr().out
    assert "gascompile_core_moves_prefetch" in printed
    assert "equals eager" in printed
    plan = namespace["compiled"].plan
    assert plan.peak_bytes["cpu"] <= 6 << 20 < plan.peak_bytes["cpu"] + plan.peak_bytes["nvme"]
    for name in ("demo-compiled/manifest.json", "gpu-plan.json", "this-machine.json"):
        assert (tmp_path / name).is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_plans")
def test_the_code_on_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run_pages("docs/training.md")
    assert (tmp_path / "timeline" / "timeline.png").is_file()


def test_every_verb_is_shown() -> None:
    commands = "\n".join(b.code for b in blocks(ROOT / "README.md") if b.language == "sh")
    verbs = set(typer.main.get_group(app).commands)
    assert {"plan", "cache"} <= verbs
    for verb in verbs:
        assert f"gascompile {verb}" in commands, verb


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make (\w+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        assert path.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(path), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_functions_that_are_named_exist(page: Path) -> None:
    for path in paths(page):
        assert (ROOT / path).exists(), path
    sources: dict[str, list[Path]] = {}
    for folder in ("passes", "cost_models", "runtime", "gascompile/core"):
        for source in (ROOT / folder).rglob("*.py"):
            if source.stem in {"plan", "machine", "workload"}:
                continue  # in the pages these are objects, not modules
            sources.setdefault(source.stem, []).append(source)
    for module, name in names(page, set(sources)):
        assert any(name in defined(source) for source in sources[module]), f"{module}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_ascii(page: Path) -> None:
    assert page.read_text(encoding="utf-8").isascii()


def test_every_error_has_advice() -> None:
    import gascompile

    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    for name in gascompile.__all__:
        if name.endswith("Error") and name != "GASCompileError":
            assert f"| `{name}` |" in text, name
