"""Training iterations of five well-known nets as workloads, generated from formulas.

Nothing here is measured. A net is written down layer by layer; each layer becomes a forward op, its
backward op and the update of its weights. The formulas:

* an activation of C channels on H x W (or of T tokens of width C) has batch * C * H * W * element bytes;
* a convolution takes 2 * batch * C_in * C_out * K * K * H * W / groups FLOPs, a product of m x k by k x n
  2 * m * k * n; backward takes twice as many (one for the input's gradient, one for the weight's);
* an op takes FLOPs / rate or bytes touched / 1.25e12 bytes/s, whichever is longer, and 5 us;
* backward reads what its op needs of the forward pass: a convolution, a product and a normalisation
  their inputs, ReLU and softmax their output, GELU its input, a sum nothing;
* an update reads a weight's gradient and writes the weight and its momentum, 20 bytes per element.

``trace`` takes the ideal seconds of an iteration, and the sum of all tensors' bytes, from a publication: FLOP rate
and element bytes are then scaled to meet them, so that shares of the ideal can be set side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gascompile.core.machine import Link, Machine, Pipe, Place
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload

_BYTES_PER_S = 1.25e12
_LAUNCH_S = 5e-6
_FLOPS_PER_S = 6e11
_SITE = "gpu"


@dataclass(frozen=True, slots=True)
class Shape:
    """An activation per sample: its name, channels (or width) and positions (or tokens)."""

    name: str
    channels: int
    positions: int

    @property
    def elements(self) -> int:
        """Elements per sample."""
        return self.channels * self.positions


@dataclass(frozen=True, slots=True)
class _Forward:
    name: str
    inputs: tuple[Shape, ...]
    output: Shape
    weight: str
    saved: tuple[str, ...]
    flops: float


@dataclass(slots=True)
class Net:
    """Collects layers, then writes the iteration."""

    name: str
    batch: int
    element_bytes: float = 4.0
    flops_per_s: float = _FLOPS_PER_S
    layers: list[_Forward] = field(default_factory=list)
    sizes: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, TensorKind] = field(default_factory=dict)

    def start(self, channels: int, positions: int) -> Shape:
        """Return the samples of the batch."""
        return self._tensor("samples", channels, positions, TensorKind.INPUT)

    def _tensor(self, name: str, channels: int, positions: int, kind: TensorKind) -> Shape:
        self.sizes[name] = float(self.batch * channels * positions)
        self.kinds[name] = kind
        return Shape(name, channels, positions)

    def layer(
        self,
        kind: str,
        inputs: Sequence[Shape],
        channels: int,
        positions: int,
        *,
        weight: int = 0,
        flops: float = 0.0,
        saves: str = "",
    ) -> Shape:
        """Add an op; ``saves`` holds ``i`` and ``o`` for what backward reads: inputs, output."""
        name = f"{len(self.layers):04d}_{kind}"
        output = self._tensor(name, channels, positions, TensorKind.ACTIVATION)
        if weight:
            self.sizes[f"{name}.w"] = float(weight)
            self.kinds[f"{name}.w"] = TensorKind.WEIGHT
        saved = tuple(shape.name for shape in inputs) if "i" in saves else ()
        saved += (name,) if "o" in saves else ()
        flops *= self.batch
        self.layers.append(
            _Forward(name, tuple(inputs), output, f"{name}.w" if weight else "", saved, flops)
        )
        return output

    def conv(self, x: Shape, channels: int, size: int, stride: int = 1, groups: int = 1) -> Shape:
        """Add a convolution, its normalisation and ReLU."""
        return self.relu(self.plain(x, channels, size, stride, groups))

    def plain(self, x: Shape, channels: int, size: int, stride: int = 1, groups: int = 1) -> Shape:
        """Add a convolution and its normalisation."""
        positions = max(1, x.positions // stride**2)
        weight = x.channels * channels * size**2 // groups
        y = self.layer(
            "conv",
            [x],
            channels,
            positions,
            weight=weight,
            flops=2.0 * weight * positions,
            saves="i",
        )
        return self.layer("norm", [y], channels, positions, weight=2 * channels, saves="i")

    def relu(self, x: Shape) -> Shape:
        """Add a ReLU."""
        return self.layer("relu", [x], x.channels, x.positions, saves="o")

    def pool(self, x: Shape, positions: int) -> Shape:
        """Add a pooling to ``positions``."""
        return self.layer("pool", [x], x.channels, positions, saves="io")

    def add(self, x: Shape, y: Shape) -> Shape:
        """Add a sum."""
        return self.layer("add", [x, y], x.channels, x.positions)

    def linear(self, x: Shape, channels: int) -> Shape:
        """Add a product with a weight."""
        weight = x.channels * channels
        return self.layer(
            "linear",
            [x],
            channels,
            x.positions,
            weight=weight,
            flops=2.0 * weight * x.positions,
            saves="i",
        )

    def _bytes(self, name: str) -> int:
        return max(4, round(self.sizes[name] * self.element_bytes))

    def workload(self) -> Workload:
        """Return the iteration: forward, backward, updates."""
        return _Writer(self).write()


class _Writer:
    """Writes the ops of one iteration."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.ops: list[OpSpec] = []
        self.sizes = {name: net._bytes(name) for name in net.sizes}
        self.kinds = dict(net.kinds)

    def write(self) -> Workload:
        for layer in self.net.layers:
            reads = (*(x.name for x in layer.inputs), *((layer.weight,) if layer.weight else ()))
            self._op(layer.name, reads, (layer.output.name,), layer.flops)
        last = self.net.layers[-1].output.name
        self._grad(last)
        self._op("loss", (last,), (f"d.{last}",), 0.0)
        for layer in reversed(self.net.layers):
            self._backward(layer)
        for name in [name for name, kind in self.net.kinds.items() if kind == TensorKind.WEIGHT]:
            self.sizes[f"{name}.m"] = self.sizes[name]
            self.kinds[f"{name}.m"] = TensorKind.STATE
            both = (name, f"{name}.m")
            self._op(f"update.{name}", (f"d.{name}", *both), both, 0.0)
        tensors = tuple(
            TensorSpec(name=name, size_bytes=size, kind=self.kinds[name])
            for name, size in self.sizes.items()
        )
        return Workload(name=self.net.name, repeats=True, tensors=tensors, ops=tuple(self.ops))

    def _backward(self, layer: _Forward) -> None:
        gradient = f"d.{layer.output.name}"
        written: list[str] = []
        for x in layer.inputs:
            if self.kinds[x.name] != TensorKind.INPUT:
                self._grad(x.name)
                written.append(f"d.{x.name}")
        if layer.weight:
            self._grad(layer.weight)
            written.append(f"d.{layer.weight}")
        weights = (layer.weight,) if layer.weight else ()
        # A gradient that another consumer has begun is added to: the op reads what it writes.
        reads = (gradient, *layer.saved, *weights)
        self._op(f"{layer.name}.back", reads, tuple(written), 2 * layer.flops)

    def _grad(self, name: str) -> None:
        self.sizes[f"d.{name}"] = self.sizes[name]
        self.kinds[f"d.{name}"] = TensorKind.GRADIENT

    def _op(self, name: str, reads: Sequence[str], writes: Sequence[str], flops: float) -> None:
        touched = sum(self.sizes[tensor] for tensor in {*reads, *writes})
        seconds = _LAUNCH_S + max(flops / self.net.flops_per_s, touched / _BYTES_PER_S)
        self.ops.append(
            OpSpec(
                name=name,
                time_s={_SITE: seconds},
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(dict.fromkeys(writes)),
                flops=round(flops),
            )
        )


def resnet152(net: Net, depth: Sequence[int] = (3, 8, 36, 3)) -> None:
    """Four stages of bottlenecks: 1x1, 3x3, 1x1 and a shortcut."""
    x = net.pool(net.conv(net.start(3, 224 * 224), 64, 7, 2), 56 * 56)
    for stage, blocks in enumerate(depth):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = net.plain(net.conv(net.conv(x, width, 1), width, 3, stride), 4 * width, 1)
            x = net.relu(net.add(y, x if block else net.plain(x, 4 * width, 1, stride)))
    net.linear(net.pool(x, 1), 1000)


def senet154(net: Net, depth: Sequence[int] = (3, 8, 36, 3)) -> None:
    """Wider bottlenecks in 64 groups; a squeeze and an excitation scale the channels of each."""
    x = net.conv(net.start(3, 224 * 224), 64, 3, 2)
    x = net.pool(net.conv(net.conv(x, 64, 3), 128, 3), 56 * 56)
    for stage, blocks in enumerate(depth):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = net.conv(net.conv(x, 2 * width, 1), 4 * width, 3, stride, 64)
            y = net.plain(y, 4 * width, 1)
            gate = net.linear(net.relu(net.linear(net.pool(y, 1), width // 4)), 4 * width)
            y = net.layer("scale", [y, gate], y.channels, y.positions, saves="i")
            x = net.relu(net.add(y, x if block else net.plain(x, 4 * width, 1, stride)))
    net.linear(net.pool(x, 1), 1000)


_BRANCHES: tuple[tuple[int, int, tuple[tuple[tuple[int, int], ...], ...]], ...] = (
    (3, 35, (((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3)), ((64, 1),))),
    (4, 17, (((192, 1),), ((160, 1), (192, 3)), ((160, 1), (160, 3), (192, 3)), ((192, 1),))),
    (2, 8, (((320, 1),), ((384, 1), (768, 2)), ((448, 1), (384, 3), (768, 2)), ((192, 1),))),
)
"""Per stage of Inception: modules, grid, and the ``(channels, kernel)`` of each branch."""


def inceptionv3(net: Net, modules: Sequence[int] = (3, 4, 2)) -> None:
    """Modules of four branches whose results are put side by side."""
    x = net.conv(net.conv(net.start(3, 299 * 299), 32, 3, 2), 64, 3)
    x = net.conv(net.conv(net.pool(x, 73 * 73), 80, 1), 192, 3)
    for (_, grid, branches), count in zip(_BRANCHES, modules, strict=True):
        x = net.pool(x, grid * grid)
        for _ in range(count):
            ends: list[Shape] = []
            for branch in branches:
                y = x
                for channels, size in branch:
                    y = net.conv(y, channels, size)
                ends.append(y)
            x = net.layer("concat", ends, sum(y.channels for y in ends), grid * grid)
    net.linear(net.pool(x, 1), 1000)


def transformer(net: Net, *, tokens: int, layers: int, width: int = 768, heads: int = 12) -> None:
    """Encoder layers: attention over ``heads`` and two products around a GELU, each with a shortcut."""
    x = net.linear(net.start(width, tokens), width)
    square = heads * tokens
    for _ in range(layers):
        y = net.layer("norm", [x], width, tokens, weight=2 * width, saves="i")
        q, k, v = (net.linear(y, width) for _ in range(3))
        product = 2.0 * tokens * tokens * width
        scores = net.layer("scores", [q, k], square, tokens, flops=product, saves="i")
        share = net.layer("softmax", [scores], square, tokens, saves="o")
        mixed = net.layer("mix", [share, v], width, tokens, flops=product, saves="i")
        x = net.add(net.linear(mixed, width), x)
        y = net.layer("norm", [x], width, tokens, weight=2 * width, saves="i")
        y = net.layer("gelu", [net.linear(y, 4 * width)], 4 * width, tokens, saves="i")
        x = net.add(net.linear(y, width), x)
    net.linear(net.pool(x, 1), 1000)


def vit(net: Net, layers: int = 12) -> None:
    """ViT-B/16 on 224 x 224: 196 patches and one token."""
    transformer(net, tokens=197, layers=layers)


def bert(net: Net, layers: int = 12) -> None:
    """BERT-base on 512 tokens."""
    transformer(net, tokens=512, layers=layers)


NETS: dict[str, Callable[[Net], None]] = {
    "bert": bert,
    "vit": vit,
    "inceptionv3": inceptionv3,
    "resnet152": resnet152,
    "senet154": senet154,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A configuration of G10's artifact: its ideal, what it reaches, and how much memory it names."""

    batch: int
    ideal_s: float
    share: float
    """Ideal seconds by the seconds of the best variant, which pages tensors in hardware."""
    software_share: float
    """The same of the variant that moves tensors by software."""
    total_bytes: float
    """The sum of all tensors, as a multiple of 40 GB."""


PUBLISHED = {
    "bert": Published(
        batch=256, ideal_s=8.743, share=0.997, software_share=0.912, total_bytes=3.701 * 40e9
    ),
    "vit": Published(
        batch=1280, ideal_s=4.459, share=0.671, software_share=0.596, total_bytes=4.611 * 40e9
    ),
    "inceptionv3": Published(
        batch=1536, ideal_s=71.63, share=0.977, software_share=0.913, total_bytes=19.69 * 40e9
    ),
    "resnet152": Published(
        batch=1280, ideal_s=135.1, share=0.984, software_share=0.973, total_bytes=27.15 * 40e9
    ),
    "senet154": Published(
        batch=1024, ideal_s=159.4, share=0.934, software_share=0.910, total_bytes=42.78 * 40e9
    ),
}
"""Of ``example_results/overall_performance`` in the repository platformxlab/G10."""


def trace(name: str, batch: int, *, ideal_s: float = 0.0, total_bytes: float = 0.0) -> Workload:
    """Return one training iteration of a net of ``NETS``.

    Args:
        name: which net.
        batch: samples per iteration.
        ideal_s: scale the FLOP rate so that the ops take so long in all; 0 leaves it alone.
        total_bytes: scale the 4 bytes per element down until all tensors have so many; 0 leaves them.
    """
    net = Net(name, batch)
    NETS[name](net)
    if total_bytes:
        found = sum(tensor.size_bytes for tensor in net.workload().tensors)
        net.element_bytes *= min(1.0, total_bytes / found)
    task = net.workload()
    if ideal_s:
        fixed = sum(op.time_s[_SITE] for op in task.ops if not op.flops)
        worked = sum(op.time_s[_SITE] for op in task.ops if op.flops)
        factor = max(1e-3, (ideal_s - fixed) / worked)
        ops = tuple(
            replace(op, time_s={_SITE: op.time_s[_SITE] * factor}) if op.flops else op
            for op in task.ops
        )
        return replace(task, ops=ops)
    return task


def published_trace(name: str) -> Workload:
    """Return the iteration whose ideal seconds and bytes are those of the published configuration."""
    known = PUBLISHED[name]
    return trace(name, known.batch, ideal_s=known.ideal_s, total_bytes=known.total_bytes)


def reference_machine() -> Machine:
    """Return the machine of G10's evaluation: 40 GB GPU, PCIe at 15.754 GB/s, SSD at 3.2 GB/s, 128 GB RAM.

    Both drives of traffic pass PCIe: the SSD's bytes share it with those of the RAM.
    """
    links = tuple(
        Link(
            source_tier=source,
            target_tier=target,
            bandwidth_bytes_per_s=rate,
            latency_s=latency_s,
            shared=(f"pcie {'in' if target == _SITE else 'out'}",),
            source="datasheet: platformxlab/G10 src/configs/example.config",
        )
        for slow, rate, latency_s in (("cpu", 15.754e9, 1e-5), ("nvme", 3.2e9, 2e-5))
        for source, target in ((_SITE, slow), (slow, _SITE))
    )
    return Machine(
        name="G10's machine",
        places=(
            Place.named(_SITE, int(40e9)),
            Place.named("cpu", int(128e9)),
            Place.named("nvme", int(3.2e12)),
        ),
        links=links,
        pipes=tuple(
            Pipe(name=f"pcie {way}", bandwidth_bytes_per_s=15.754e9) for way in ("in", "out")
        ),
    )
