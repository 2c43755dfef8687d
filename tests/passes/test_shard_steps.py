"""Steps over equal ranks against every combination of few layers' options, and what one option costs by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gascompile.core.checks.hosts import named_hosts
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.hosts import Hosts
from gascompile.core.machine import Place, PlaceKind
from gascompile.passes.parallel.chain import Block, chain
from gascompile.passes.parallel.plan_shards import plan_shards
from gascompile.passes.parallel.shard_clock import AHEAD, interleaved, step_seconds
from gascompile.passes.parallel.shard_options import (
    BACKWARD,
    FORWARD,
    Option,
    Training,
    layer_options,
    world_of,
)
from tests.passes.stacks import MB, stack

GB = 10**9


def _hosts(gpu: int, ranks: int = 2) -> Hosts:
    hosts = named_hosts("v100-8")
    host = hosts.hosts[0]
    place = Place(name="gpu", kind=PlaceKind.GPU, size_bytes=gpu + GB)
    return replace(
        hosts, hosts=(replace(host, ranks=ranks, machine=host.machine.with_place(place)),)
    )


@pytest.mark.parametrize("gpu", [2 * GB, 3 * GB, 6 * GB])
def test_no_combination_of_options_is_faster(gpu: int) -> None:
    workload = stack(3, weight=400 * MB, tokens=20_000)
    hosts, training = _hosts(gpu), Training()
    made = plan_shards(workload, hosts)
    found, world = chain(workload), world_of(hosts)
    rest = layer_options(found.layer, world, training)
    ends = layer_options(found.ends, world, training)
    buffers = AHEAD * found.layer.weight_bytes + found.layer.saved_bytes

    def fits(options: tuple[Option, ...]) -> bool:
        held = sum(option.held_bytes["gpu"] for option in options)
        return held + buffers <= world.sizes["gpu"]

    rest, ends = _fastest(rest, 14), _fastest(ends, 4)
    best = min(
        step_seconds(interleaved([(option, 1) for option in layers]), head)
        for layers in itertools.combinations_with_replacement(rest, 3)
        for head in ends
        if fits((*layers, head))
    )
    assert made.lower_bound_s <= best * (1 + 1e-9)
    assert made.predicted_s <= best * 1.1
    assert made.peak_bytes["gpu"] <= world.sizes["gpu"]


def _fastest(options: list[Option], count: int) -> list[Option]:
    """Return the options of which each takes least, alone, and those that hold least."""
    alone = sorted(options, key=lambda o: step_seconds([o], o))[: count // 2]
    small = sorted(options, key=lambda o: (o.held_bytes["gpu"], step_seconds([o], o)))
    return [*alone, *(o for o in small[:count] if o not in alone)][:count]


def test_an_option_by_hand() -> None:
    world = world_of(_hosts(32 * GB, ranks=2))
    block = Block(name="b", weight_bytes=300 * MB, flops=125 * 10**9, num_ops=1, out_bytes=MB)
    options = layer_options(block, world, Training(), ("gpu",))
    sharded = next(
        o for o in options if o.params_over == 2 and not o.keeps and "re" not in o.activations
    )
    # Half comes from the other rank at 150 GB/s, forward and backward; half of the gradients goes there.
    peers_s = 1e-5 + 150e6 / 150e9
    assert sharded.load_s("peers", FORWARD) == pytest.approx(peers_s)
    assert sharded.load_s("peers", BACKWARD) == pytest.approx(2 * peers_s)
    # Parameters, gradients and twelve bytes of states for each of 150 million parameters, on two ranks.
    assert sharded.held_bytes["gpu"] == pytest.approx(150 * MB * (2 + 2 + 12) / 2 + MB)
    assert sharded.zero_stage == 3
    whole = next((o for o in options if o.params_over == 1 and o.states_over == 1), None)
    assert whole is None or whole.zero_stage == 0


def test_what_ranks_share_has_even_parts() -> None:
    world = world_of(_hosts(32 * GB, ranks=8))
    # Four switches of 15.75 GB/s for eight ranks; one array of drives at 2 GB/s; 153.6 GB/s of DRAM.
    assert world.rates["to gpu"] == pytest.approx(15.75e9 / 2)
    assert world.rates["drive read"] == pytest.approx(2e9 / 8)
    assert world.rates["dram"] == pytest.approx(153.6e9 / 8)


def test_a_machine_without_rates_is_refused() -> None:
    hosts = _hosts(32 * GB)
    host = hosts.hosts[0]
    silent = replace(host, machine=replace(host.machine, memory=()))
    with pytest.raises(UnsupportedOpError, match="rate of its memory"):
        world_of(replace(hosts, hosts=(silent,)))
