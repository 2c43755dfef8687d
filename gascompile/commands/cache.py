"""``cache``: what is kept between runs, and how to get rid of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gascompile.commands import options as opt
from gascompile.commands.output import emit, grid, note
from gascompile.core.sizes import format_size

if TYPE_CHECKING:  # torch comes with it, which help and wrong usage need not wait for
    from gascompile.api.cache_upkeep import CacheItem

cache = typer.Typer(
    help="List or remove kept plans and captures, spilled weights, compiled code and machine profiles.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Keys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY...", help="Keys, or beginnings of keys that fit one entry.", show_default=False
    ),
]
OlderThan = Annotated[
    float | None,
    typer.Option(
        "--older-than",
        parser=opt.age,
        metavar="AGE",
        help="Also plans, captures and code written longer ago: 30d.",
    ),
]
MaxSize = Annotated[
    int | None,
    typer.Option(
        "--max-size",
        parser=opt.size,
        metavar="SIZE",
        help="Also the oldest plans and captures until it fits.",
    ),
]
KeepWeights = Annotated[
    bool,
    typer.Option(
        "--keep-weights", help="Leave spilled weights alone; saved bundles may need them."
    ),
]


@cache.command("ls")
def list_items(cache_dir: opt.CacheDir = None, json: opt.JsonFlag = False) -> None:
    """List plans, captures, spilled weights, compiled code and machine profiles.

    Example: [bold]gascompile cache ls[/bold]
    """
    from gascompile.api.cache_upkeep import items

    folder = opt.cache_dir_of(cache_dir)
    cached = items(folder)
    total_bytes = sum(item.size_bytes for item in cached)
    data = {
        "cache_dir": str(folder),
        "total_bytes": total_bytes,
        "items": [_item_json(item) for item in cached],
    }
    emit(json, data, *([_table(str(folder), cached)] if cached else []), note(_sum(cached)))


@cache.command("rm")
def remove_items(keys: Keys, cache_dir: opt.CacheDir = None, json: opt.JsonFlag = False) -> None:
    """Remove entries by key.

    Example: [bold]gascompile cache rm 3fa9c1[/bold]
    """
    from gascompile.api.cache_upkeep import items, remove, select

    folder = opt.cache_dir_of(cache_dir)
    with opt.usage_errors():
        chosen = select(items(folder), keys)
    remove(folder, chosen)
    emit(json, _removed_json(chosen), note(f"removed {_sum(chosen)}"))


@cache.command("gc")
def collect_items(
    older_than: OlderThan = None,
    max_size: MaxSize = None,
    keep_weights: KeepWeights = False,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Remove damaged plans, leftovers of killed runs, and spilled weights that no kept plan needs.

    A bundle saved from a model without a checkpoint refers to spilled weights: keep them with
    --keep-weights where there are such bundles. Weights younger than an hour stay, as a process at work may
    need them. A saved bundle whose compiled code goes by --older-than
    runs without it.

    Example: [bold]gascompile cache gc --older-than 30d --max-size 10GiB[/bold]
    """
    from gascompile.api.cache_upkeep import collect

    removed = collect(
        opt.cache_dir_of(cache_dir),
        older_than_s=older_than,
        max_size_bytes=max_size,
        keep_weights=keep_weights,
    )
    emit(json, _removed_json(removed), note(f"removed {_sum(removed)}"))


def _item_json(item: CacheItem) -> dict[str, Any]:
    return {
        "key": item.key,
        "kind": item.kind.value,
        "label": item.label,
        "bytes": item.size_bytes,
        "age_seconds": item.age_s,
        "ok": item.ok,
        "path": item.path,
    }


def _removed_json(removed: Sequence[CacheItem]) -> dict[str, Any]:
    return {
        "removed": [_item_json(item) for item in removed],
        "removed_bytes": sum(item.size_bytes for item in removed),
    }


def _sum(cached: Sequence[CacheItem]) -> str:
    size = format_size(sum(item.size_bytes for item in cached))
    return f"{len(cached)} entr{'y' if len(cached) == 1 else 'ies'}, {size}"


def _table(title: str, cached: Sequence[CacheItem]) -> Any:
    columns = [
        ("key", False),
        ("what", False),
        ("of", False),
        ("size", True),
        ("age", True),
        ("", False),
    ]
    rows = [
        (
            item.key if item.kind.value == "machine" else item.key[:12],
            item.kind.value,
            item.label,
            format_size(item.size_bytes),
            _age(item),
            _state(item),
        )
        for item in cached
    ]
    return grid(title, columns, rows)


def _age(item: CacheItem) -> str:
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if item.age_s >= seconds:
            return f"{item.age_s / seconds:.0f} {unit}"
    return f"{item.age_s:.0f} s"


def _state(item: CacheItem) -> str:
    if item.ok:
        return ""
    return "unused" if item.kind.value == "weights" else "damaged"
