"""Transformers' own tests of generation and of its Trainer, against compiled models and planned training steps.

``python -m benchmarks.transformers_tests CHECKOUT`` takes a checkout of transformers of the installed version, whose
tests need the packages ``parameterized``, ``datasets`` and ``httpx`` beside what is installed. They run twice without a
network: as they are, and, those that pass so, with ``plugin`` loaded. The result says of each what came of it; a test
that passes without a single call of a compiled model or a planned step stands apart, for it shows nothing.
Results go to ``benchmarks/results/transformers_tests-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import headed, write_result
from benchmarks.transformers_tests.groups import FAMILIES, TRAINING, why_not
from benchmarks.transformers_tests.plugin import BUDGET, MODE, REPORT

Line = Mapping[str, Any]
"""What the plugin tells of one test."""
_ROOT = Path(__file__).parents[2]
_GENERATE = ("-m", "generate")
_QUICK = ("-m", "not slow")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests; return 1 where one fails that applies."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformers_tests")
    parser.add_argument("checkout", type=Path, help="folder of transformers' sources with tests/")
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="folders of tests/models")
    parser.add_argument("--training", nargs="*", default=TRAINING, help="files of tests/trainer")
    parser.add_argument("--sources", help="version or commit of the checkout, for the result")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per test")
    parser.add_argument("--lines", type=Path, help="folder that keeps the lines of each run")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = asked.lines or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        groups = {
            name: _group(asked.checkout, folder, name, paths, marks, asked.timeout)
            for name, paths, marks in _groups(asked.families, asked.training)
        }
    result = headed("transformers_tests") | {
        "sources": asked.sources,
        "budget": BUDGET,
        "counts": {
            name: {kind: count(found) for kind, found in group.items()}
            for name, group in groups.items()
        },
        "groups": groups,
    }
    path = write_result(result, asked.output)
    for name, counts in result["counts"].items():
        print(name, counts)
    print(f"Written to {path}")
    return int(any(group["failed"] for group in groups.values()))


def _groups(
    families: Iterable[str], training: Sequence[str]
) -> Iterable[tuple[str, list[str], tuple[str, ...]]]:
    for family in families:
        yield family, [f"tests/models/{family}/test_modeling_{family}.py"], _GENERATE
    if training:
        yield "trainer", [f"tests/trainer/{name}" for name in training], _QUICK


def _group(
    checkout: Path,
    folder: Path,
    name: str,
    paths: list[str],
    marks: tuple[str, ...],
    timeout: float,
) -> dict[str, Any]:
    """Return what came of the tests of some files, by kind and file."""
    plain = _lines(checkout, folder / f"{name}-plain.jsonl", "plain", [*paths, *marks], timeout)
    passing = [line["name"] for line in plain if line["outcome"] == "passed"]
    compiled = []
    if passing:
        compiled = _lines(checkout, folder / f"{name}.jsonl", "compiled", passing, timeout)
    return sorted_out(plain, compiled)


def _lines(
    checkout: Path, file: Path, mode: str, what: Sequence[str], timeout: float
) -> list[Line]:
    """Return one line per test; a run that is there already is taken as it is."""
    if not file.exists():
        part = file.with_suffix(".part")
        part.unlink(missing_ok=True)
        known = os.environ.get("PYTHONPATH", "")
        environment = os.environ | {
            MODE: mode,
            REPORT: str(part.resolve()),
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{known}",
            "HF_HUB_OFFLINE": "1",
        }
        options = ["-p", "benchmarks.transformers_tests.plugin", "-p", "no:cacheprovider", "-q"]
        options += ["-W", "ignore", "-o", "log_cli=false", f"--timeout={timeout}"]
        command = [sys.executable, "-m", "pytest", *options, *what]
        subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr, check=False)
        if not part.exists():
            raise SystemExit(f"pytest ran no test of {checkout}: {' '.join(what)[:200]}")
        part.rename(file)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def sorted_out(plain: Iterable[Line], compiled: Iterable[Line]) -> dict[str, Any]:
    """Return all tests by what came of them.

    Args:
        plain: lines of the run with nothing replaced.
        compiled: lines of the run of those that pass so.
    """
    kinds = ("passed", "passed_without_a_call", "does_not_apply", "failed", "skipped_by_the_library",
             "fails_without_us")  # fmt: skip
    found: dict[str, Any] = {kind: {} for kind in kinds}
    passing = set()
    for line in plain:
        if line["outcome"] == "passed":
            passing.add(line["name"])
        elif line["outcome"] == "skipped":
            _note(found["skipped_by_the_library"], line["name"], line["reason"])
        else:
            _note(found["fails_without_us"], line["name"], line["reason"])
    for line in compiled:
        name = line["name"]
        if name not in passing:
            continue
        if line["outcome"] == "passed":
            kind = "passed" if line["calls"] else "passed_without_a_call"
            file, _, test = name.partition("::")
            found[kind].setdefault(file, []).append(test)
        elif line["outcome"] == "skipped":
            _note(found["skipped_by_the_library"], name, line["reason"])
        else:
            why = why_not(name)
            _note(found["does_not_apply" if why else "failed"], name, why or line["reason"])
    return found


def _note(kind: dict[str, dict[str, list[str]]], name: str, reason: str) -> None:
    """Put the name of a test under its file and reason."""
    file, _, test = name.partition("::")
    kind.setdefault(file, {}).setdefault(reason, []).append(test)


def count(found: Mapping[str, Any]) -> int:
    """Return how many names there are under files, or under files and reasons."""
    return sum(len(part) if isinstance(part, list) else count(part) for part in found.values())


if __name__ == "__main__":
    sys.exit(main())
