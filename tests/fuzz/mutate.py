"""Ways to spoil files: bytes, JSON values, and structured changes that keep every checksum right."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gascompile.core.serial import raw_digest

CANARIES = ("antigravity", "this", "turtledemo.clock", "idlelib.run", "lib2to3.main")
"""Modules of the standard library that nothing here imports."""
OUTSIDE = "/tmp/gascompile-fuzz-outside"
_CODE = (
    "\rimport antigravity", "\nimport this\n", "x=__import__('antigravity')", "a\u2028import this", "\x0cimport this",
    "__import__('os').system('true')", "self", "torch", "device", "inf", "lambda", "None", "a b", "\u212b", "\u0660",
    "", "\0", "\ud800", "%x", "..", "../../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", OUTSIDE,
    "x" * 5000, "w[0:5]", "[0:0]", "operator", "mover", "w0", "gpu", "cpu", "nvme", "nvme->gpu", "\x1b[2J", "9" * 100,
)  # fmt: skip
_NUMBERS = (
    0, -1, 1, 2, 3, 7, 8, 16, 63, 64, 255, 4096, 10**6, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64, 10**400,
    0.5, -0.5, 1e-300, 1e300, 1e308, 5e-324, float("nan"), float("inf"), True, False,
)  # fmt: skip
_VALUES: tuple[Any, ...] = (None, [], {}, [[]], {"a": 1}, [0], ["x"], *_CODE, *_NUMBERS)
_TYPES = (
    "collections.defaultdict", "collections.OrderedDict", "collections.deque", "collections.namedtuple", "torch.Size",
    "builtins.list", "builtins.tuple", "torch.fx.immutable_collections.immutable_list", "antigravity.x", None,
    "transformers.antigravity.X", "transformers.modeling_outputs.BaseModelOutput",
    "transformers.cache_utils.DynamicCache",
)  # fmt: skip
_CONTEXTS = (
    "null", "[]", '["a", "b"]', "3", '{"__enum__": true, "fqn": "antigravity:x", "name": "y"}', "x", None,
    {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": ["found", "mean"]},
    {"default_factory_module": "builtins", "default_factory_name": "eval", "dict_context": ["found", "mean"]},
    {"default_factory_module": "builtins", "default_factory_name": "list", "dict_context": ["found", "mean"]},
)  # fmt: skip
_ENUMS: tuple[dict[str, Any], ...] = (
    {"dtype": "quint8"}, {"dtype": "float64"}, {"dtype": "bits8"}, {"dtype": "complex64"}, {"dtype": "bool"},
    {"layout": "sparse_coo"}, {"layout": "strided"}, {"device": "cuda"}, {"device": "meta"}, {"device": "cpu"},
    {"memory_format": "channels_last"}, {"float": "inf"}, {"float": "1e999"}, {"complex": [1, 2]}, {"slice": [0, 1, 2]},
    {"list": []}, {"tuple": [1, 1]}, {"list": [1 << 40]}, {"node": "nobody"}, {"os": "system"},
)  # fmt: skip


def op_names() -> tuple[str, ...]:
    """Return every op that torch has registered, and names that are none."""
    import torch

    names = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        names.append(f"{namespace}.{packet}.{overload or 'default'}")
    odd = (
        "os.system",
        "builtins.eval",
        "operator.pow",
        "operator.getitem",
        "operator.mul",
        "math.ceil",
        "torch.load",
    )
    return (*sorted(names), *odd)


def places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside ``data``."""
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def at(data: Any, place: tuple[Any, ...]) -> Any:
    """Return what stands at a path."""
    for key in place:
        data = data[key]
    return data


def spoil(data: Any, rng: random.Random) -> None:
    """Drop, double, replace, scale, copy, swap, rename or nest one thing of JSON data."""
    known = list(places(data))
    if not known:
        return
    place = rng.choice(known)
    parent, key, value = at(data, place[:-1]), place[-1], at(data, place)
    kind = rng.choice(
        ("drop", "double", "replace", "replace", "scale", "copy", "swap", "rename", "nest")
    )
    if kind == "drop":
        del parent[key]
    elif kind == "double" and isinstance(parent, list):
        parent.insert(rng.randint(0, len(parent)), copy.deepcopy(value))
    elif kind == "scale" and isinstance(value, (int, float)):
        try:
            parent[key] = value * rng.choice((-1, 2, 10**9, 0.5))
        except OverflowError:
            parent[key] = 0
    elif kind == "copy":
        parent[key] = copy.deepcopy(at(data, rng.choice(known)))
    elif kind == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], value
    elif kind == "rename" and isinstance(parent, dict):
        parent[rng.choice(_CODE)] = parent.pop(key)
    elif kind == "nest":
        depth = rng.choice((1, 3, 40, 150))
        for _ in range(depth):
            value = [value] if rng.random() < 0.5 else {"list": [value]}
        parent[key] = value
    else:
        parent[key] = copy.deepcopy(rng.choice(_VALUES))  # a later change may be to the value


def spoil_program(data: dict[str, Any], rng: random.Random, ops: tuple[str, ...]) -> None:
    """Change a program as someone would who knows its format."""
    nodes = [node for node in data["nodes"] if "target" in node]
    node = rng.choice(nodes)
    names = [entry["name"] for entry in data["nodes"]]
    kind = rng.choice(
        (
            "op",
            "op_only",
            "keyword",
            "argument",
            "type",
            "node",
            "rename",
            "shape",
            "output",
            "state",
        )
    )
    if kind in ("op", "op_only"):
        node["target"] = rng.choice(ops)
        if kind == "op":
            node["args"] = [_argument(names, rng) for _ in range(rng.randint(0, 4))]
    elif kind == "keyword":
        node["kwargs"][rng.choice((*_CODE, "dtype", "out", "size", "dim", "self", "generator"))] = (
            _argument(names, rng)
        )
    elif kind == "argument" and node["args"]:
        node["args"][rng.randrange(len(node["args"]))] = _argument(names, rng)
    elif kind == "type":
        field = rng.choice(("in_spec", "out_spec"))
        spec = json.loads(data[field])
        nested = [spec[1], *spec[1]["children_spec"]]
        chosen = rng.choice(nested)
        if rng.random() < 0.7:
            chosen["type"] = rng.choice(_TYPES)
        if rng.random() < 0.7:
            chosen["context"] = copy.deepcopy(rng.choice(_CONTEXTS))
        data[field] = json.dumps(spec)
    elif kind == "rename":
        before, after = rng.choice(names), rng.choice((*_CODE, *names))
        text = json.dumps(data).replace(f'"{before}"', json.dumps(after))
        data.clear()
        data.update(json.loads(text))
    elif kind == "shape":
        bound = data["bound"][rng.choice(list(data["bound"]))]
        bound[rng.choice(("dtype", "shape"))] = rng.choice(
            ("quint8", "bits8", "float16", [], [0], [1 << 40], [-1], [2, 2])
        )
    elif kind == "output":
        data["outputs"][0] = _argument(names, rng)
    elif kind == "state":
        data["states"] = rng.choice(([], list(data["bound"])[:2], ["x"]))
    else:
        data["nodes"].insert(rng.randrange(len(data["nodes"])), {
            "name": f"more_{rng.randrange(9)}", "target": rng.choice(ops),
            "args": [_argument(names, rng) for _ in range(rng.randint(0, 3))], "kwargs": {},
        })  # fmt: skip


def _argument(names: list[str], rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return {"node": rng.choice(names)}
    if kind < 0.6:
        return {"list": [_argument(names, rng) for _ in range(rng.randint(0, 3))]}
    if kind < 0.75:
        return copy.deepcopy(rng.choice(_ENUMS))
    return rng.choice((*_NUMBERS[:20], *_CODE, None, True))


def spoil_weights(data: dict[str, Any], rng: random.Random) -> None:
    """Point weights elsewhere, or beyond their files."""
    source = data["sources"][rng.choice(list(data["sources"]))]
    extent = rng.choice(source["extents"])
    kind = rng.choice(("offset", "bytes", "path", "stamp", "dtype", "shape"))
    if kind in ("offset", "bytes"):
        extent[kind] = rng.choice(
            (0, -1, -4096, 1, 2**40, 2**62, extent[kind] + 1, extent[kind] * 2)
        )
    elif kind == "path":
        extent["path"] = rng.choice(_CODE)
    elif kind == "stamp":
        rng.choice(data["stamps"])["path"] = rng.choice(_CODE)
    elif kind == "dtype":
        source["dtype"] = rng.choice(("quint8", "bits16", "float16", "int8", "bool", "x", "nn"))
    else:
        source["shape"] = rng.choice(([], [-1], [2**40], [1, 1], list(reversed(source["shape"]))))


def spoil_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Return ``raw`` with some bytes changed, dropped, doubled or cut off."""
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        if not changed:
            break
        begin = rng.randrange(len(changed))
        kind = rng.random()
        if kind < 0.01:
            changed[begin:begin] = b"[" * 50_000
        elif kind < 0.6:
            changed[begin] = rng.randrange(256)
        elif kind < 0.75:
            del changed[begin : begin + rng.randint(1, 64)]
        elif kind < 0.9:
            changed[begin:begin] = changed[begin : begin + rng.randint(1, 64)]
        else:
            del changed[begin:]
    return bytes(changed)


def sign(folder: Path) -> None:
    """Make the checksums of a bundle right again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        if (folder / name).is_file():
            manifest["files"][name] = raw_digest((folder / name).read_bytes())
    path.write_text(json.dumps(manifest))


def spoil_gguf(path: Path, rng: random.Random) -> None:
    """Change bytes of a GGUF file, or put numbers of four or eight bytes in the place of others."""
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        path.write_bytes(spoil_bytes(bytes(raw), rng))
        return
    for _ in range(rng.randint(1, 3)):
        form, size = rng.choice((("<I", 4), ("<Q", 8)))
        begin = rng.randrange(700)
        (before,) = struct.unpack_from(form, raw, begin)
        odd = (
            0,
            1,
            2,
            9,
            30,
            255,
            1 << 31,
            1 << 40,
            1 << 62,
            (1 << 64) - 1,
            before + 1,
            before - 1,
            before * 2,
        )
        struct.pack_into(form, raw, begin, rng.choice(odd) % (1 << 8 * size))
    path.write_bytes(raw)


def spoil_header(path: Path, rng: random.Random) -> None:
    """Change the header of a safetensors file; its length stays right."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    for _ in range(rng.randint(1, 3)):
        spoil(header, rng)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
