"""Budget: how much of which places the runtime may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.core.errors import UnknownPlaceError
from gascompile.core.machine import Machine
from gascompile.core.sizes import parse_size

Size = int | str


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Budget:
    """Bytes the runtime may allocate per place; a place that is not named is left at what the machine holds.

    Sizes are read by ``sizes.parse_size``: ``Budget(gpu="24GiB", cpu="64GiB")``. Places of other names stand in a
    mapping: ``Budget({"gpu": "24GiB", "h0.nvme0": "1TB"})``.
    """

    sizes: tuple[tuple[str, Size], ...]
    """By name, in the order of the names, so that equal budgets compare equal."""
    nvme_path: str | None
    """The folder on the drive where what leaves memory lies; ``None`` for that of ``cache_dir``."""

    def __init__(
        self,
        places: Mapping[str, Size | None] | None = None,
        *,
        gpu: Size | None = None,
        cpu: Size | None = None,
        nvme: Size | None = None,
        nvme_path: str | None = None,
    ) -> None:
        """Take sizes by place; ``gpu``, ``cpu`` and ``nvme`` are the places of these names.

        Raises:
            ValueError: the sizes are no mapping from names, or a place is given twice.
        """
        if places is not None and not isinstance(places, Mapping):
            raise ValueError(
                f"a Budget takes sizes by place, not {places!r}; write Budget(gpu=...), Budget(cpu=...) or "
                "Budget({'gpu': ..., 'h0.nvme0': ...})"
            )
        sizes: dict[str, Size] = {}
        keywords = {"gpu": gpu, "cpu": cpu, "nvme": nvme}
        for name, value in (*(places or {}).items(), *keywords.items()):
            if not isinstance(name, str):
                raise ValueError(f"a Budget names places by their names, not {name!r}")
            if value is None:
                continue
            if name in sizes:
                raise ValueError(f"the budget of '{name}' is given twice; give it once")
            sizes[name] = value
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        object.__setattr__(self, "nvme_path", nvme_path)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        path = "" if self.nvme_path is None else f", nvme_path={self.nvme_path!r}"
        return f"Budget({dict(self.sizes)!r}{path})"

    @property
    def gpu(self) -> Size | None:
        """The size given for ``gpu``."""
        return dict(self.sizes).get("gpu")

    @property
    def cpu(self) -> Size | None:
        """The size given for ``cpu``."""
        return dict(self.sizes).get("cpu")

    @property
    def nvme(self) -> Size | None:
        """The size given for ``nvme``."""
        return dict(self.sizes).get("nvme")

    def with_size(self, place: str, size: Size) -> Budget:
        """Return the budget with another size of ``place``."""
        return Budget({**dict(self.sizes), place: size}, nvme_path=self.nvme_path)

    def limits_bytes(self, machine: Machine) -> dict[str, int]:
        """Return the limit of every place of ``machine`` in bytes.

        Raises:
            UnknownPlaceError: the budget names a place that the machine does not have.
            ValueError: a size is none.
        """
        given = dict(self.sizes)
        known = tuple(place.name for place in machine.places)
        if unknown := sorted(given.keys() - set(known)):
            raise UnknownPlaceError(unknown[0], machine.name, known)
        return {
            place.name: parse_size(given.get(place.name, place.size_bytes))
            for place in machine.places
        }

    @staticmethod
    def of(value: Budget | Size | None, machine: Machine) -> Budget:
        """Return a ``Budget`` from what a user may pass; a bare size means the place that computes."""
        if isinstance(value, Budget):
            return value
        return Budget() if value is None else Budget({machine.compute_tier: parse_size(value)})
