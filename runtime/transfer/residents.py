"""Loading of the weights that stay: started when a session opens, awaited one by one at their first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.core.sources import WeightSource
from gascompile.core.tiles import base_name
from gascompile.core.workload import TensorKind
from gascompile.runtime.protocols import Ticket, TransferEngine
from gascompile.runtime.transfer.read_plan import Landing

Progress = Callable[[int, int], None]
"""Called with ``(bytes_done, bytes_total)`` as resident weights arrive, by the thread that read them."""


class Residents:
    """Which resident weights have arrived, are on their way or have yet to be asked for."""

    def __init__(
        self,
        engine: TransferEngine,
        landings: Mapping[str, Landing],
        addresses: Mapping[str, int],
        *,
        first_use: Mapping[str, int],
        link: str,
        progress: Progress | None,
    ) -> None:
        self._engine = engine
        self._landings = landings
        self._addresses = addresses
        self._order = sorted(addresses, key=lambda name: first_use.get(name, 0))
        self._first_use = first_use
        self._link = link
        self._progress = progress
        self._progress_lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = sum(landings[name].size_bytes for name in addresses)
        self._loading: dict[str, Ticket] = {}
        self._loaded: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every resident has been awaited."""
        return len(self._loaded) == len(self._addresses)

    def start(self) -> None:
        """Ask for every resident that has not arrived and is not on its way."""
        for name in self._order:
            if name not in self._loaded and name not in self._loading:
                self._loading[name] = self._engine.submit(
                    self._landings[name],
                    self._addresses[name],
                    key=self._first_use.get(name, 0),
                    link=self._link,
                    on_done=partial(self._arrived, self._landings[name].size_bytes),
                )

    def pending(self, name: str) -> Ticket | None:
        """Return the ticket of a resident that nobody has awaited yet."""
        return self._loading.get(name)

    def settle(self, name: str) -> None:
        """Note that a resident has been awaited."""
        self._loaded.add(name)
        self._loading.pop(name, None)

    def forget_failed(self) -> None:
        """After the engine was drained: forget what was cancelled or failed, so ``start`` asks again."""
        for name, ticket in list(self._loading.items()):
            if ticket.failed:
                del self._loading[name]

    def _arrived(self, size_bytes: int) -> None:
        if self._progress is None:
            return
        with self._progress_lock:
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self._total_bytes)


def resident_addresses(plan: Plan) -> dict[str, int]:
    """Return the arena address of every weight that the plan keeps in the compute tier."""
    return {
        name: tensor.address
        for name, tensor in plan.tensors.items()
        if tensor.kind is TensorKind.WEIGHT and tensor.address is not None
    }


def first_uses(plan: Plan) -> dict[str, int]:
    """Return the first op that reads each tensor."""
    first: dict[str, int] = {}
    for i, op in enumerate(plan.workload.ops):
        for name in op.reads:
            first.setdefault(name, i)
    return first


def check_residents(addresses: Mapping[str, int], sources: Mapping[str, WeightSource]) -> None:
    """Raise ``PlanMismatchError`` where a resident weight has no file."""
    for name in addresses:
        if name not in sources and base_name(name) not in sources:
            raise PlanMismatchError(f"the plan keeps '{name}', for which there is no file")
