"""Runs cases in a process of its own and prints what came of them: ``python -m tests.fuzz.worker SEEDS BEGIN END``."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import gascompile
from gascompile.api.plan_hosts import plan_hosts
from gascompile.bundles.check import check_program_of
from gascompile.commands.reporting import read_subject
from gascompile.core import serial
from gascompile.core.checks.hosts import named_hosts
from gascompile.core.errors import GASCompileError
from gascompile.core.hosts_plan import HostsPlan
from gascompile.core.plan import Plan
from gascompile.cost_models.simulate.trace import trace
from gascompile.passes.explain.explain import explain
from gascompile.passes.verify.walk import verify
from gascompile.report.page import page
from gascompile.weights.checkpoint import open_checkpoint
from tests.core.bad_files import BUDGET, MACHINE, WORKLOAD
from tests.fuzz import mutate, mutate_onnx, onnx_files
from tests.fuzz.oracle import Hang, Watch, limit_memory
from tests.fuzz.seeds import inputs
from tests.passes.stacks import stack

KINDS = ("program", "program", "program", "program", "plan_in", "weights", "manifest", "held", "bytes", "plan",
         "run", "workload", "machine", "header", "index", "gguf", "gguf", "plan_one", "machine_one",
         "hosts", "hosts_plan", "onnx", "onnx")  # fmt: skip
_FEW_RANKS = 3
"""More are read and checked alone: the time of a plan grows with them."""
_OLDER = {"plan_one": "plan", "machine_one": "machine"}
"""Files of formats of before, which are used as those of today are."""
_PARTS = {"program": "program.json", "plan_in": "plan.json", "weights": "weights.json"}


class Cases:
    """The cases of one set of seeds; number ``n`` is the same in every process."""

    def __init__(self, seeds: Path, scratch: Path) -> None:
        self._seeds = seeds
        self._scratch = scratch
        self._ops = mutate.op_names()
        self._inputs = inputs()
        with gascompile.load(
            seeds / "bundle", any_machine=True, cache_dir=seeds / "cache"
        ) as model:
            self._wanted = model(*self._inputs)
            check_program_of(model.plan, model.program)  # imports what it needs of torch
        for name in onnx_files.NAMES:
            assert onnx_files.use(seeds / "onnx" / name) == "same result"

    def make(self, number: int) -> tuple[str, Path]:
        """Write the files of a case; return its kind and where they are."""
        rng = random.Random(number)
        kind = rng.choice(KINDS)
        place = self._scratch / "case"
        shutil.rmtree(place, ignore_errors=True)
        if kind in ("workload", "machine", "plan", "run", "hosts", "hosts_plan", *_OLDER):
            self._spoil_json(self._seeds / f"{kind}.json", place.with_suffix(".json"), rng)
            return kind, place.with_suffix(".json")
        if kind == "gguf":
            shutil.copytree(self._seeds / "gguf", place)
            mutate.spoil_gguf(place / "model.gguf", rng)
            return kind, place
        if kind == "onnx":
            shutil.copytree(self._seeds / "onnx" / rng.choice(onnx_files.NAMES), place)
            mutate_onnx.spoil(place, rng)
            return kind, place
        if kind in ("header", "index"):
            shutil.copytree(self._seeds / ("model" if kind == "header" else "sharded"), place)
            if kind == "header":
                mutate.spoil_header(place / "model.safetensors", rng)
            else:
                index = place / "model.safetensors.index.json"
                self._spoil_json(index, index, rng)
            return kind, place
        shutil.copytree(self._seeds / "bundle", place)
        self._spoil_bundle(kind, place, rng)
        return kind, place

    def _spoil_json(self, source: Path, target: Path, rng: random.Random) -> None:
        raw = source.read_bytes()
        if rng.random() < 0.3:
            target.write_bytes(mutate.spoil_bytes(raw, rng))
            return
        data = json.loads(raw)
        for _ in range(rng.randint(1, 3)):
            mutate.spoil(data, rng)
        target.write_text(json.dumps(data))

    def _spoil_bundle(self, kind: str, folder: Path, rng: random.Random) -> None:
        if kind == "held":
            mutate.spoil_header(folder / "held.safetensors", rng)
        elif kind == "manifest":
            mutate.sign(folder)
            self._spoil_json(folder / "manifest.json", folder / "manifest.json", rng)
            return
        elif kind == "bytes":
            name = rng.choice(("program.json", "plan.json", "weights.json", "held.safetensors"))
            (folder / name).write_bytes(mutate.spoil_bytes((folder / name).read_bytes(), rng))
        else:
            data = json.loads((folder / _PARTS[kind]).read_text())
            for _ in range(rng.randint(1, 2)):
                self._spoil_part(kind, data, rng)
            (folder / _PARTS[kind]).write_text(json.dumps(data))
        mutate.sign(folder)

    def _spoil_part(self, kind: str, data: Any, rng: random.Random) -> None:
        # What an earlier change has spoilt may lack what a later one looks for.
        with contextlib.suppress(KeyError, TypeError, IndexError, ValueError, AttributeError):
            if kind == "program" and rng.random() < 0.8:
                mutate.spoil_program(data, rng, self._ops)
                return
            if kind == "weights" and rng.random() < 0.7:
                mutate.spoil_weights(data, rng)
                return
        mutate.spoil(data, rng)

    def use(self, kind: str, place: Path) -> str:
        """Do with the files what a user does; return what came of it."""
        kind = _OLDER.get(kind, kind)
        if kind == "workload":
            _check(gascompile.plan(place, BUDGET, MACHINE, time_limit_s=1))
        elif kind == "machine":
            _check(gascompile.plan(WORKLOAD, BUDGET, place, time_limit_s=1))
        elif kind == "plan":
            plan = Plan.load(place)
            gascompile.simulate(plan)
            for name in (*list(plan.tensors)[:3], *(op.name for op in plan.ops[:1])):
                explain(plan, name)
            _check(plan)
            page(plan, trace(plan, plan.machine))
        elif kind == "hosts":
            if (hosts := named_hosts(place)).num_ranks <= _FEW_RANKS:
                plan_hosts(stack(2), hosts)
        elif kind == "hosts_plan":
            serial.dumps(HostsPlan.load(place))
        elif kind == "run":
            plan, measured = read_subject(self._seeds / "plan.json", place)
            page(plan, trace(plan, plan.machine), run=measured)
        elif kind == "onnx":
            return onnx_files.use(place)
        elif kind in ("header", "index", "gguf"):
            found = open_checkpoint(place)
            assert all(source.size_bytes >= 0 for source in found.sources.values())
        else:
            return self._run(kind, place)
        return "used"

    def _run(self, kind: str, place: Path) -> str:
        with gascompile.load(place, any_machine=True, cache_dir=self._scratch / "cache") as model:
            found = model(*self._inputs)
        if kind in ("plan_in", "manifest", "held"):
            same = _equal(found, self._wanted)
            return "same result" if same else "other result"
        return "another model's result"


def _check(plan: Plan) -> None:
    verify(plan)
    assert all(peak <= plan.budget_bytes.get(tier, 0) for tier, peak in plan.peak_bytes.items())


def _equal(found: Any, wanted: Any) -> bool:
    leaves, expected = (torch.utils._pytree.tree_leaves(tree) for tree in (found, wanted))
    return len(leaves) == len(expected) and all(
        isinstance(a, torch.Tensor) and torch.equal(a, b)
        for a, b in zip(leaves, expected, strict=True)
    )


def run(seeds: Path, begin: int, end: int) -> None:
    """Run the cases from ``begin`` to ``end`` and print JSON: a line per failure, and the counts."""
    with tempfile.TemporaryDirectory(prefix="gascompile-fuzz-") as folder:
        cases = Cases(seeds, Path(folder))
        watch = Watch(Path(folder))
        watch.allow(seeds)
        limit_memory()
        counts: Counter[str] = Counter()
        for number in range(begin, end):
            print(f"#{number}", file=sys.stderr, flush=True)
            kind, place = cases.make(number)
            problem = ""
            try:
                with watch.case():
                    outcome = cases.use(kind, place)
            except GASCompileError as error:
                outcome = type(error).__name__
            except (Exception, Hang) as error:  # noqa: BLE001 - whatever it is, is what is looked for
                outcome = "untyped"
                problem = f"{type(error).__name__}: {error!s:.300} {traceback.format_exc()[-900:]}"
            if watch.found:
                problem = f"{problem} {watch.found[:3]}"
            if outcome == "other result":
                problem = f"{problem} other result"
            counts[f"{kind}: {outcome}"] += 1
            if problem:
                print(json.dumps({"case": number, "kind": kind, "problem": problem}), flush=True)
        print(json.dumps({"counts": counts}), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
