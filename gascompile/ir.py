"""The data that flows through the compiler: workload, machine, budget, plan. Frozen, and free of torch.

Every type here is plain data with units in its names; ``serial`` turns each of them into the JSON of
its format and back. JSON names that differ from the Python ones stand in the field's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike
from typing import ClassVar

from gascompile import serial
from gascompile.units import align_up, parse_size


def _json(name: str) -> Mapping[str, str]:
    return {"json": name}


class TensorKind(StrEnum):
    """What a tensor is to the model; decides whether it persists and whether it is ever dirty."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    STATE = "state"
    INPUT = "input"
    OUTPUT = "output"
    WORKSPACE = "workspace"


class SolverStatus(StrEnum):
    """How the search ended, in our words."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIMEOUT = "timeout"


# ---------------------------------------------------------------- workload: gascompile.workload/1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """In which form a weight lies in its file, moves, and is computed in: ``float32``, ``int8`` and so on."""

    stored: str
    wire: str
    compute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a workload. Aliases (views) are folded into the tensor whose storage they share."""

    name: str
    size_bytes: int = field(metadata=_json("bytes"))
    """Bytes of the wire form: what moves, and what lies in the arena."""
    kind: TensorKind
    forms: Forms | None = field(default=None, metadata={"left_out": True})
    """Set where the tensor moves in another form than it is computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """One op in execution order. ``reads`` and ``writes`` name storages, never views of them."""

    name: str
    time_s: Mapping[str, float] = field(metadata=_json("seconds"))
    """Seconds per device that can run the op; device names are tier names."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    workspace_bytes: int = 0
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    splits: Mapping[str, int] = field(default_factory=dict)
    """Weights along whose rows the op may be split, with the number of rows: a linear's output features."""
    gather_tier: str = ""  # where gathered rows lie; empty for the usual tier
    gathers: Mapping[str, int] = field(default_factory=dict)
    """Weights of which the op needs only some rows, with the bytes that it needs: an embedding's."""

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte read or written; 0 for an op that moves nothing."""
        moved_bytes = self.read_bytes + self.write_bytes
        return self.flops / moved_bytes if moved_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The planning problem: ops in execution order over tensors. No torch in it."""

    FORMAT: ClassVar[str] = "gascompile.workload/1"

    name: str
    repeats: bool
    """Iterations follow each other: weights and states persist, a prefetch may cross the end."""
    tensors: tuple[TensorSpec, ...]
    ops: tuple[OpSpec, ...]


# ---------------------------------------------------------------- machine: gascompile.machine/1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A memory: how much it holds."""

    size_bytes: int = field(metadata=_json("bytes"))
    source: str = ""
    """Where the number comes from: ``measured <date>: <how>`` or ``datasheet: <which>``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A one-way path between two tiers."""

    source_tier: str = field(metadata=_json("from"))
    target_tier: str = field(metadata=_json("to"))
    bandwidth_bytes_per_s: float = field(metadata=_json("bytes_per_second"))
    latency_s: float = field(default=0.0, metadata=_json("latency_seconds"))
    """Fixed cost of one transfer."""
    shared: tuple[str, ...] = ()
    """Names of the pipes this link shares with others."""
    source: str = ""

    @property
    def name(self) -> str:
        """The link's name in plans and reports, e.g. ``nvme->cpu``."""
        return f"{self.source_tier}->{self.target_tier}"

    def transfer_time_s(self, size_bytes: int) -> float:
        """Seconds that one transfer of ``size_bytes`` occupies the link."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """Bandwidth that several links share, such as a PCIe switch uplink."""

    name: str
    bandwidth_bytes_per_s: float = field(metadata=_json("bytes_per_second"))
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """What a device reached with products of one arithmetic intensity: few rows are slower than many."""

    flops_per_byte: float
    flops_per_s: float = field(metadata=_json("flops_per_second"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """Matrix rate of a device for one dtype (torch's name without the ``torch.`` prefix)."""

    device: str
    dtype: str
    flops_per_s: float = field(metadata=_json("flops_per_second"))
    """The best that any product reaches."""
    source: str = ""
    points: tuple[RatePoint, ...] = ()
    """Rates by growing intensity; without any, ``flops_per_s`` holds for every product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """Bandwidth of a device to its own memory, and the fixed cost of launching one op."""

    device: str
    bandwidth_bytes_per_s: float = field(metadata=_json("bytes_per_second"))
    op_overhead_s: float = field(default=0.0, metadata=_json("op_overhead_seconds"))
    source: str = ""
    library_bytes: int = 0
    """What libraries allocate there beside the plan's own: the workspace of cuBLAS. It is part of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IoSettings:
    """How the slow tier is read best on this machine, found by the same engine that will read it."""

    num_threads: int = 4
    chunk_bytes: int = 8 << 20
    source: str = ""
    engine: str = "reads"
    """What brings bytes from the drive to a GPU: ``reads`` through pinned buffers, or ``kvikio``."""
    path: str = ""
    """How they came when that was measured, in the engine's words."""
    least_bytes: int = 0
    """Smaller tensors come by ``reads`` even where the engine is another."""

    @property
    def staging_bytes(self) -> int:
        """Host memory between a drive and a device: two chunks for each thread."""
        return 2 * max(1, self.num_threads) * align_up(self.chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferencePoint:
    """Share of every link's speed that is lost while ops of one arithmetic intensity run."""

    flops_per_byte: float
    lost_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """How much ops slow transfers down: readers want the same processors. Without points not at all."""

    points: tuple[InterferencePoint, ...] = ()
    op_s_per_byte: float = 0.0
    """Seconds that ops lose per byte that moves: reading threads take processors from them."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Tiers, links and rates of one machine."""

    FORMAT: ClassVar[str] = "gascompile.machine/1"

    name: str
    tiers: Mapping[str, Tier]
    links: tuple[Link, ...]
    pipes: tuple[Pipe, ...] = ()
    rates: tuple[ComputeRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    io: IoSettings = field(default_factory=IoSettings)
    interference: Interference = field(default_factory=Interference)
    backend: str = ""
    """What executes: ``cpu``, ``cuda`` or ``emulated``; empty for the one that the computing tier has."""

    @property
    def compute_backend(self) -> str:
        """The backend that executes: ``cuda`` where a GPU computes, unless it says otherwise."""
        return self.backend or ("cuda" if self.compute_tier == "gpu" else "cpu")

    @property
    def compute_tier(self) -> str:
        """The tier that computes: the GPU where there is one, else RAM."""
        return "gpu" if "gpu" in self.tiers else "cpu"

    def links_into(self, tier: str) -> tuple[Link, ...]:
        """Return the links that end at ``tier``, fastest first."""
        found = [link for link in self.links if link.target_tier == tier]
        return tuple(sorted(found, key=lambda link: -link.bandwidth_bytes_per_s))

    def library_bytes(self, tier: str) -> int:
        """Return what libraries allocate on a tier beside the plan's own."""
        return sum(rate.library_bytes for rate in self.memory if rate.device == tier)

    def link(self, name: str) -> Link:
        """Return the link called ``name`` (``nvme->cpu``); ``KeyError`` when there is none."""
        for link in self.links:
            if link.name == name:
                return link
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes the runtime may allocate per tier; ``None`` leaves a tier at what the machine holds.

    Sizes are read by ``units.parse_size``: ``Budget(gpu="24GiB", cpu="64GiB")``.
    """

    gpu: int | str | None = None
    cpu: int | str | None = None
    nvme: int | str | None = None
    nvme_path: str | None = None

    def limits_bytes(self, machine: Machine) -> dict[str, int]:
        """Return the limit of every tier of ``machine`` in bytes."""
        given = {"gpu": self.gpu, "cpu": self.cpu, "nvme": self.nvme}
        limits: dict[str, int] = {}
        for tier, spec in machine.tiers.items():
            value = given.get(tier)
            limits[tier] = spec.size_bytes if value is None else parse_size(value)
        return limits

    @staticmethod
    def of(value: Budget | int | str | None, machine: Machine) -> Budget:
        """Return a ``Budget`` from what a user may pass; a bare size means the tier that computes."""
        if isinstance(value, Budget):
            return value
        if value is None:
            return Budget()
        size_bytes = parse_size(value)
        return Budget(gpu=size_bytes) if machine.compute_tier == "gpu" else Budget(cpu=size_bytes)


# ---------------------------------------------------------------- plan: gascompile.plan/1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run op ``op`` of the workload."""

    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Start reading ``tensor`` over ``link`` to ``address`` of the compute tier's arena."""

    op: int
    """Index of the op before which the step stands; ``len(ops)`` at the end of an iteration."""
    tensor: str
    link: str
    size_bytes: int = field(metadata=_json("bytes"))
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Block until the newest transfer of ``tensor`` (at ``address``) is complete."""

    op: int
    tensor: str
    address: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """From here on the bytes of ``tensor`` (at ``address``) may be overwritten."""

    op: int
    tensor: str
    address: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Start copying ``tensor`` out of the compute tier over ``link``. Its bytes stay until a ``Release``."""

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=_json("bytes"))
    address: int | None = None
    """``None``: the tensor has no fixed place in the arena; the same holds for the steps around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Take memory for ``tensor`` and start copying it back over ``link``."""

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=_json("bytes"))
    address: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Run op ``source`` again: what it writes comes back without a transfer."""

    op: int
    source: int


Step = Compute | Prefetch | Wait | Release | Offload | Reload | Recompute
"""A plan's steps stand in program order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Where one tensor lives."""

    home: str
    """Tier that holds the tensor between its uses. A weight whose home is the compute tier is resident."""
    kind: TensorKind
    size_bytes: int = field(metadata=_json("bytes"))
    address: int | None = None
    """Arena address of a resident weight; ``None`` for everything that is not in the arena all the time."""
    forms: Forms | None = field(default=None, metadata={"left_out": True})
    """Set where the tensor moves in another form than it is computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlan:
    """Where one op runs and how long that is expected to take."""

    name: str
    site: str
    time_s: float = field(metadata=_json("seconds"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proven about a plan's time per iteration."""

    predicted_s: float
    """Seconds of one iteration as the replay found them; the steady state where the workload repeats."""
    lower_bound_s: float
    """The best bound proven (at least ``limit_s``): nothing that ``holds_over`` names is faster."""
    limit_s: float
    """The physical limit: the largest of compute time and, per link, unavoidable bytes over bandwidth."""
    gap: float
    """``(predicted_s - lower_bound_s) / predicted_s``."""
    status: SolverStatus
    solve_s: float
    binding: str
    """The resource that sets ``limit_s``: ``compute`` or a link's name."""
    solver: str = ""
    """``highs`` or ``cbc``; ``none`` where heuristics alone made the plan."""
    holds_over: str = "weights"  # or "everything": the decisions that ``lower_bound_s`` bounds
    lower_bound_all_s: float = 0.0  # no plan whatsoever is faster; 0 where that was not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement with its timed moves, and all that is needed to check, replay and execute it.

    Steps describe one iteration. Where the workload repeats, a prefetch whose wait stands *earlier*
    in the list is for the next iteration; before the very first one the runtime issues those
    prefetches up front.
    """

    FORMAT: ClassVar[str] = "gascompile.plan/1"

    fingerprint: Mapping[str, str]
    """Digest of everything the plan was made from, by part: graph, machine, budget, options, versions and so on."""
    strategy: str
    """Which candidate won: ``ilp`` or the name of a heuristic."""
    budget_bytes: Mapping[str, int]
    arena_bytes: Mapping[str, int]
    """Size of the arena per tier; addresses in steps are offsets into it."""
    peak_bytes: Mapping[str, int]
    link_bytes: Mapping[str, int]
    """Bytes moved per link in one iteration."""
    tensors: Mapping[str, TensorPlan]
    ops: tuple[OpPlan, ...]
    steps: tuple[Step, ...]
    certificate: Certificate
    workload: Workload
    machine: Machine
    warnings: tuple[str, ...] = ()
    reserved_bytes: int = 0  # what is left of the tier that computes for libraries and buffers

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all; raises ``StorageError``."""
        serial.write_atomic(path, serial.dumps(self))

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Read a plan; raises ``FormatError`` or ``StorageError``. It is data: run ``verify`` before you trust it."""
        from gascompile.plan_check import check_plan_content

        found = serial.load(Plan, path)
        check_plan_content(found, where=f"{path}: $")
        return found


# ---------------------------------------------------------------- where weights come from


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """Identity of a file when it was planned on; a changed file is refused."""

    path: str
    size_bytes: int = field(metadata=_json("bytes"))
    mtime_ns: int
    digest: str = ""
    """BLAKE2b of the content where it was computed (bundles), else of the safetensors header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of bytes in a file."""

    path: str
    offset: int
    size_bytes: int = field(metadata=_json("bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """The bytes of one weight: extents that follow each other in memory."""

    name: str
    dtype: str
    """torch's name without the ``torch.`` prefix."""
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    stride: tuple[int, ...] = ()
    """Strides of the tensor whose first to last element the bytes are; empty for a contiguous one."""

    @property
    def size_bytes(self) -> int:
        """Total bytes of the weight."""
        return sum(extent.size_bytes for extent in self.extents)
