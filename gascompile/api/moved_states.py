"""Moved states: how a model's states are seen while a session that moves them has their values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from gascompile.bundles.bundle import Bundle
from gascompile.codegen.allocator_library import page_memory
from gascompile.core.errors import OpenStepError
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.core.waiting import life, require_life
from gascompile.runtime.collectives.local_ranks import LocalRanks
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.memory.lasting_accounts import moves_lasting
from gascompile.runtime.memory.pinned import host_bytes, pinned_bytes
from gascompile.runtime.memory.run_memory import SiteMemory
from gascompile.runtime.memory.shared_arena import SharedCpu
from gascompile.runtime.run.lasting_session import LastingSession
from gascompile.runtime.run.session import Session
from gascompile.runtime.run.shared_session import SharedSession
from gascompile.runtime.transfer.residents import Progress


def open_session(
    bundle: Bundle,
    cache_dir: Path,
    *,
    early: EarlyMemory | None,
    progress: Progress | None,
    ranks: LocalRanks | None = None,
) -> Session:
    """Return a session of the size and with the resident weights, or with the moved states, of a plan.

    Args:
        bundle: the plan, its weights and its states.
        cache_dir: where what leaves memory goes.
        early: memory that was taken ahead for an arena.
        progress: told about the loading of resident weights.
        ranks: of this host, all of which open one for the same plan; they share its arena.
    """
    plan, weights, folder = bundle.plan, bundle.weights, cache_dir / "spill"
    if not moves_lasting(plan):
        of = Session if ranks is None else SharedSession
        return of.for_plan(
            plan,
            sources=weights.sources,
            stamps=weights.stamps,
            states=bundle.held,
            progress=progress,
            early=early,
            spill_folder=folder,
            memory=_site_memory(plan, cache_dir),
            device=SharedCpu(ranks) if ranks is not None else None,
        )
    if early is not None:
        early.discard()
    require_own_values(bundle.held.values())
    # What stands for the memory of an emulated device is the host's, too.
    in_ram = plan.machine.compute_backend != "cuda"
    limit_bytes = plan.budget_bytes[plan.machine.compute_tier]
    session = LastingSession(
        plan,
        sources=weights.sources,
        stamps=weights.stamps,
        states=bundle.held,
        folder=folder,
        pages=page_memory(cache_dir, limit_bytes) if in_ram else None,
        in_ram=in_ram,
    )
    try:
        _cover_states(session)
    except BaseException:
        session.close()
        raise
    return session


def _site_memory(plan: Plan, cache_dir: Path) -> SiteMemory | None:
    """Return where ops of a plan take their memory, where some run on the host beside a device."""
    if plan_sites(plan) is None:
        return None
    tier = plan.machine.compute_tier
    held_bytes = plan.peak_bytes[tier] - plan.arena_bytes.get(tier, 0)
    held_bytes += host_bytes(plan) - pinned_bytes(plan)
    if (pages := page_memory(cache_dir, held_bytes)) is None:
        return None
    return SiteMemory(pages, held_bytes, in_ram=plan.machine.compute_backend != "cuda")


def require_own_values(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors of a model whose values somebody else has.

    Raises:
        ForkedError: a compiled model of the process that this one was forked from.
        OpenStepError: another compiled model, or a training step.
    """
    for tensor in tensors:
        if (cover := tensor.__dict__.get("_cover")) is not None:
            # Of a session that an interrupt left in a cycle, or that is giving the values back.
            gc.collect()
            cover.wait()
        cover = tensor.__dict__.get("_cover")
        if cover is None:
            continue
        require_life(cover.life, f"the value of '{cover.name}'")
        raise OpenStepError(
            f"the value of '{cover.name}' is with {cover.holder}; close that first, and then compile the model"
        )


def has_taken_states(session: Session | None) -> bool:
    """Return whether a session has values that are the model's."""
    return isinstance(session, LastingSession) and bool(session.taken.tensors)


def _cover_states(session: LastingSession) -> None:
    """Let the tensors whose values a session has taken be open: who reads or writes one reaches the value."""
    taken = session.taken
    from gascompile.training.state.open_tensors import Cover

    # The model's tensors know their covers, and must not keep a session that nobody else has.
    of, here, keeper = weakref.ref(session), life(), session.keeper

    def opened() -> LastingSession | None:
        require_life(here, "the session that has the model's states")
        if (lasting := of()) is None:
            # Who dropped it was interrupted; the model's tensors have their values after that.
            keeper.do(bool)
        return lasting

    def value(name: str) -> torch.Tensor:
        lasting = opened()
        return lasting.state(name) if lasting is not None else taken.tensors[name].detach().clone()

    def assign(name: str, new: torch.Tensor) -> None:
        if (lasting := opened()) is not None:
            lasting.assign_state(name, new)
        else:
            taken.tensors[name].detach().copy_(new)

    covers = {
        name: Cover(
            name,
            tensor,
            taken.store.tensors[name].to("meta"),
            partial(value, name),
            partial(assign, name),
            holder="a compiled model that moves it",
            wait=opened,
            settle=keeper.wait,
        )
        for name, tensor in taken.tensors.items()
    }
    taken.give = lambda name, value: covers[name].give_back(value)

    def put() -> None:
        for cover in covers.values():
            cover.put()

    session.keeper.do(put)
