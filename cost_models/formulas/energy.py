"""Energy of a plan: what processors draw while they run ops and while they wait, and what moved bytes take.

E = sum over processors (busy W x busy s + idle W x rest of the iteration) + sum over links (J per byte x bytes).
"""

from __future__ import annotations

import math

from gascompile.core.machine import PlaceKind
from gascompile.core.plan import Plan
from gascompile.core.reports import Energy
from gascompile.cost_models.simulate.replay import runs

_COMPUTING = (PlaceKind.GPU, PlaceKind.CPU)


def plan_energy(plan: Plan) -> Energy | None:
    """Return what one iteration of ``plan`` takes in joules by the constants of its machine; pure.

    ``None`` where a constant is missing: of a processor, at ops or not, or of a link that the plan moves bytes over.
    """
    model = plan.machine.energy
    if model is None:
        return None
    power = {processor.device: processor for processor in model.processors}
    per_byte = {link.link: link.joules_per_byte for link in model.links}
    devices = [place.name for place in plan.machine.places if place.kind in _COMPUTING]
    moved = {name: size_bytes for name, size_bytes in plan.link_bytes.items() if size_bytes}
    busy_s = dict.fromkeys(devices, 0.0)
    for op in runs(plan.steps):
        site = plan.ops[op].site
        busy_s[site] = busy_s.get(site, 0.0) + plan.ops[op].time_s
    if busy_s.keys() - power.keys() or moved.keys() - per_byte.keys():
        return None
    whole_s = plan.certificate.predicted_s
    parts = [per_byte[name] * size_bytes for name, size_bytes in moved.items()]
    for device, seconds in busy_s.items():
        rest_s = max(whole_s - seconds, 0.0)
        parts += [power[device].busy_w * seconds, power[device].idle_w * rest_s]
    # Rounded once, whatever the order: equal plans take the same to the last digit.
    return Energy(joules=math.fsum(parts), source="model")
