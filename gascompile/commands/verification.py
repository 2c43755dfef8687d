"""``verify``: a plan or a bundle from anywhere, checked without running it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gascompile.commands import options as opt
from gascompile.commands.output import counted, emit, note
from gascompile.commands.plans import PlanArgument
from gascompile.core.errors import StorageError
from gascompile.core.plan import Plan
from gascompile.core.serial import parse_json
from gascompile.core.sizes import format_size
from gascompile.core.sources import FileStamp

Rehash = Annotated[
    bool,
    typer.Option("--weights", help="Read every weight file of a bundle and compare its content."),
]


def verify(plan_path: PlanArgument, weights: Rehash = False, json: opt.JsonFlag = False) -> None:
    """Check that a plan keeps its budgets and dependencies; for a bundle, also its files and weights.

    Example: [bold]gascompile verify compiled/ --weights[/bold]
    """
    from gascompile.capture.saved.grammar import check_program
    from gascompile.passes.verify.walk import verify as check

    stamps: tuple[FileStamp, ...] = ()
    opt.require_plan_or_bundle(plan_path)
    if opt.is_bundle(plan_path):
        from gascompile.bundles.files import read_bundle_files

        bundle = read_bundle_files(plan_path)
        check_program(
            parse_json(bundle.raw["program.json"], where="program.json"), where="program.json"
        )
        plan, stamps = bundle.plan, bundle.weights.stamps
    elif weights:
        raise typer.BadParameter(
            f"{plan_path} is no bundle, so it has no weight files; leave out --weights"
        )
    else:
        plan = Plan.load(plan_path)
    check(plan)
    for stamp in stamps:
        check_stamp(stamp, rehash=weights)
    size_bytes = sum(stamp.size_bytes for stamp in stamps)
    data = {
        "ok": True,
        "model": plan.workload.name,
        "num_steps": len(plan.steps),
        "weight_files": [stamp.path for stamp in stamps],
        "weights_rehashed": weights,
    }
    files = (
        f"; {counted(len(stamps), 'weight file')} of {format_size(size_bytes)} unchanged"
        if stamps
        else ""
    )
    emit(
        json, data, note(f"ok: {plan_path} keeps its budgets in all {len(plan.steps)} steps{files}")
    )


def check_stamp(stamp: FileStamp, *, rehash: bool) -> None:
    """Check that a weight file is the one that was planned on.

    A file of the same size and time counts as unchanged unless ``rehash``; a touched one by its content.

    Raises:
        StorageError: the file is missing or another one.
    """
    try:
        stat = os.stat(stamp.path)
    except OSError as error:
        raise StorageError(
            f"the weight file {stamp.path} cannot be opened ({error.strerror}); put it back, or load the bundle with "
            "checkpoint= and its new place"
        ) from error
    if stat.st_size != stamp.size_bytes:
        raise StorageError(
            f"the weight file {stamp.path} has {stat.st_size} bytes, the plan was made for one of "
            f"{stamp.size_bytes}; restore it or compile the model again"
        )
    if not rehash and stat.st_mtime_ns == stamp.mtime_ns:
        return
    if _digest_now(stamp) != stamp.digest:
        raise StorageError(
            f"the content of the weight file {stamp.path} differs from what the plan was made for; restore it or "
            "compile the model again"
        )


def _digest_now(stamp: FileStamp) -> str:
    from gascompile.bundles.bundle import content_stamp
    from gascompile.core.progress import task
    from gascompile.weights.checkpoint import header_digest

    if not stamp.digest.startswith("content:"):
        return header_digest(Path(stamp.path))
    with task(f"Checking {Path(stamp.path).name}", stamp.size_bytes) as advance:
        return content_stamp(replace(stamp), advance).digest
