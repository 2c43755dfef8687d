# ruff: noqa: E501 - a table, of a line each
"""Kinds of values that a model's result may depend on, and ways in which its code may reach one."""

from __future__ import annotations

from dataclasses import dataclass

_IMPORTS = """
import abc, argparse, array, collections, contextvars, dataclasses, datetime, decimal, enum, fractions, functools
import itertools, operator, pathlib, re, threading, types, typing, uuid, weakref
import numpy, torch
from torch import nn
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: how one is written, before and after an edit, and a number that is read of it."""

    name: str
    before: str
    after: str
    read: str
    """``{v}`` stands for the expression that reaches the value."""
    definitions: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """Where a value lies and how code gets at it: the texts of three modules, ``{read}`` in one."""

    name: str
    reach: str
    consts: str = "V = {value}"
    main: str = ""
    """Statements of the model's module."""
    setup: str = ""
    """Statements of the model's ``__init__``."""
    inside: str = ""
    """Statements of ``forward``."""


def _made(name: str, text: str, read: str, definitions: str = "") -> Kind:
    """Return a kind whose text has ``#`` where the number stands."""
    return Kind(name, text.replace("#", "2"), text.replace("#", "3"), read, definitions)


_OBJECT = "class Thing:\n    def __init__(self, k): self.k = k\n    def m(self): return self.k\n"
_SLOTS = "class Slots:\n    __slots__ = ('k',)\n    def __init__(self, k): self.k = k\n"
_DATA = "@dataclasses.dataclass{0}\nclass Data:\n    k: int\n"

KINDS = (
    _made("int", "#", "{v}"),
    _made("float", "0.#", "{v}"),
    _made("complex", "#+1j", "{v}.real"),
    Kind("bool", "True", "False", "1.0 if {v} else 2.0"),
    Kind("none", "None", "0", "1.0 if {v} is None else 2.0"),
    Kind("int_to_bool", "1", "True", "type({v}).__name__.__len__()"),
    Kind("minus_zero", "0.0", "-0.0", "1.0 / (1e-9 if str({v}) == '0.0' else 1.0)"),
    Kind("str", "'ab'", "'abc'", "len({v})"),
    _made("bytes", "bytes([#])", "{v}[0]"),
    _made("bytearray", "bytearray([#])", "{v}[0]"),
    _made("memoryview", "memoryview(bytes([#]))", "{v}[0]"),
    _made("list", "[1, #]", "{v}[1]"),
    _made("tuple", "(1, #)", "{v}[1]"),
    _made("dict", "{'k': #}", "{v}['k']"),
    Kind("dict_order", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}", "next(iter({v}.values()))"),
    _made("set", "{1, #}", "sum({v})"),
    _made("frozenset", "frozenset({1, #})", "sum({v})"),
    _made("deque", "collections.deque([#])", "{v}[0]"),
    Kind("deque_length", "collections.deque([1], 2)", "collections.deque([1], 3)", "{v}.maxlen"),
    _made("ordered_dict", "collections.OrderedDict(k=#)", "{v}['k']"),
    _made("default_dict", "collections.defaultdict(lambda: #)", "{v}['new']"),
    _made("chain_map", "collections.ChainMap({'k': #})", "{v}['k']"),
    _made("counter", "collections.Counter(k=#)", "{v}['k']"),
    _made("array", "array.array('i', [#])", "{v}[0]"),
    _made("fraction", "fractions.Fraction(#, 5)", "float({v})"),
    _made("decimal", "decimal.Decimal(#)", "float({v})"),
    _made("date", "datetime.date(2020, 1, #)", "{v}.day"),
    _made("timedelta", "datetime.timedelta(#)", "{v}.days"),
    _made("uuid", "uuid.UUID(int=#)", "{v}.int"),
    Kind("path", "pathlib.Path('a')", "pathlib.Path('ab')", "len({v}.name)"),
    _made("slice", "slice(#, 9)", "{v}.start"),
    _made("range", "range(#, 9)", "{v}.start"),
    _made("namespace", "argparse.Namespace(k=#)", "{v}.k"),
    _made("simple_namespace", "types.SimpleNamespace(k=#)", "{v}.k"),
    _made("mapping_proxy", "types.MappingProxyType({'k': #})", "{v}['k']"),
    _made("enum", "Color.A", "{v}.value", "class Color(enum.Enum):\n    A = {number}\n"),
    _made("int_enum", "Color.A", "int({v})", "class Color(enum.IntEnum):\n    A = {number}\n"),
    _made("data_class", "Data(#)", "{v}.k", _DATA.format("")),
    _made("slots_data_class", "Data(#)", "{v}.k", _DATA.format("(slots=True, frozen=True)")),
    _made("named_tuple", "Pair(1, #)", "{v}.b", "Pair = collections.namedtuple('Pair', 'a b')\n"),
    _made("object", "Thing(#)", "{v}.k", _OBJECT),
    _made("nested_object", "Thing([{'a': Thing(#)}])", "{v}.k[0]['a'].k", _OBJECT),
    _made("slots", "Slots(#)", "{v}.k", _SLOTS),
    _made("bound_method", "Thing(#).m", "{v}()", _OBJECT),
    _made("weak_reference", "weakref.ref(KEPT)", "{v}().k", _OBJECT + "KEPT = Thing({number})\n"),
    _made("numpy_array", "numpy.array([1, #])", "int({v}[1])"),
    _made("numpy_scalar", "numpy.float32(#)", "float({v})"),
    _made("numpy_objects", "numpy.array([1, #], dtype=object)", "{v}[1]"),
    _made("tensor", "torch.tensor([#.0])", "{v}"),
    _made("tensor_view", "torch.tensor([1.0, #.0])[1:]", "{v}"),
    Kind("dtype", "torch.float32", "torch.float64", "{v}.itemsize"),
    _made("size", "torch.Size([#])", "{v}[0]"),
    Kind("pattern", "re.compile('a')", "re.compile('ab')", "len({v}.pattern)"),
    _made("lambda", "lambda: #", "{v}()"),
    _made("partial", "functools.partial(max, 1, #)", "{v}()"),
    _made("partial_method", "Late()", "{v}.m()",
          "class Late:\n    def _m(self, k): return k\n    m = functools.partialmethod(_m, {number})\n"),
    _made("cached_function", "cached", "{v}()",
          "@functools.lru_cache\ndef cached(): return {number}\n"),
    _made("cached_property", "Lazy()", "{v}.m",
          "class Lazy:\n    @functools.cached_property\n    def m(self): return {number}\n"),
    _made("property", "Lazy()", "{v}.m", "class Lazy:\n    m = property(lambda self: {number})\n"),
    _made("descriptor", "Lazy()", "{v}.m",
          "class D:\n    def __get__(self, o, t=None): return {number}\nclass Lazy:\n    m = D()\n"),
    _made("callable", "Called(#)", "{v}()",
          "class Called:\n    def __init__(self, k): self.k = k\n    def __call__(self): return self.k\n"),
    _made("class", "Kept", "{v}.k", "class Kept:\n    k = {number}\n"),
    _made("class_method", "Kept", "{v}.m()",
          "class Kept:\n    k = {number}\n    @classmethod\n    def m(cls): return cls.k\n"),
    _made("static_method", "Kept", "{v}.m()",
          "class Kept:\n    @staticmethod\n    def m(): return {number}\n"),
    _made("inherited", "Kept()", "{v}.k", "class Base:\n    k = {number}\nclass Kept(Base): pass\n"),
    _made("metaclass", "Kept", "{v}.k",
          "class Meta(type):\n    k = {number}\nclass Kept(metaclass=Meta): pass\n"),
    _made("get_attribute", "Kept()", "{v}.k",
          "class Kept:\n    def __getattr__(self, name): return {number}\n"),
    _made("int_subclass", "Number(#)", "int({v})", "class Number(int): pass\n"),
    _made("int_with_field", "N", "{v}.k", "class Number(int): pass\nN = Number(1)\nN.k = {number}\n"),
    _made("dict_with_field", "N", "{v}.k", "class Named(dict): pass\nN = Named()\nN.k = {number}\n"),
    _made("context_variable", "CV", "{v}.get()", "CV = contextvars.ContextVar('c')\nCV.set({number})\n"),
    _made("exception", "ValueError(#)", "{v}.args[0]"),
    _made("operator", "operator.itemgetter(#)", "{v}([5, 6, 7, 8])"),
    _made("single_dispatch", "shown", "{v}(1)",
          "@functools.singledispatch\ndef shown(x): return 0\n@shown.register\ndef _(x: int): return {number}\n"),
    _made("closure", "make(#)", "{v}()", "def make(k):\n    def inner(): return k\n    return inner\n"),
    _made("function_attribute", "marked", "{v}.k", "def marked(): pass\nmarked.k = {number}\n"),
    _made("layer", "[Layer()]", "{v}[0].k", "class Layer(nn.Module):\n    k = {number}\n"),
)  # fmt: skip

WAYS = (
    Way("global", "V", consts="", main="V = {value}"),
    Way("package_module", "pkg.consts.V", main="import pkg.consts"),
    Way("module", "consts.V", main="from pkg import consts"),
    Way("renamed_module", "c.V", main="import pkg.consts as c"),
    Way("name", "V", main="from pkg.consts import V"),
    Way("name_inside", "V", inside="from pkg.consts import V"),
    Way("module_inside", "pkg.consts.V", inside="import pkg.consts"),
    Way("renamed_inside", "c.V", inside="import pkg.consts as c"),
    Way("relative_inside", "V", inside="from .consts import V"),
    Way("attribute", "self.v", main="from pkg.consts import V", setup="self.v = V"),
    Way("hidden", "self.held[0]['v']", main="from pkg import consts", setup="self.held = [{'v': consts.V}]"),
    Way("of_class", "self.v[0]", main="from pkg.consts import V", setup="type(self).v = [V]"),
    Way("default", "given()", main="from pkg.consts import V\ndef given(v=V): return v"),
    Way("named_default", "given()", main="from pkg.consts import V\ndef given(*, v=V): return v"),
    Way("closed_over", "GIVEN()", main="from pkg import consts\ndef make(v):\n    return lambda: v\nGIVEN = make(consts.V)"),
    Way("of_function", "given.v", main="from pkg import consts\ndef given(): pass\ngiven.v = consts.V"),
    Way("by_helper", "helper()", consts="V = {value}\ndef helper(): return V", main="from pkg.consts import helper"),
    Way("by_module_helper", "pkg.consts.helper()", consts="V = {value}\ndef helper(): return V", main="import pkg.consts"),
    Way("getattr", "getattr(consts, 'V')", main="from pkg import consts"),
    Way("getattr_named", "getattr(consts, NAME)", main="from pkg import consts\nNAME = 'V'"),
    Way("handed_on", "taken(consts)", main="from pkg import consts\ndef taken(m): return m.V"),
    Way("vars", "vars(consts)['V']", main="from pkg import consts"),
    Way("globals", "globals()['V']", consts="", main="V = {value}"),
    Way("eval", "eval('V')", consts="", main="V = {value}"),
    Way("import_module", "importlib.import_module('pkg.consts').V", main="import importlib"),
    Way("import_module_loaded", "importlib.import_module('pkg.consts').V", main="import importlib, pkg.consts"),
    Way("loaded_modules", "sys.modules['pkg.consts'].V", main="import sys, pkg.consts"),
    Way("registry", "REGISTRY['v']()", main="from pkg import consts\nREGISTRY = {}\ndef register(f):\n    REGISTRY['v'] = f\n@register\ndef found(): return consts.V"),
    Way("mixin", "self.mixed()", main="from pkg.consts import V\nclass Mixin:\n    def mixed(self): return V\nBASES = (Mixin,)"),
    Way("child", "self.child.v", main="from pkg.consts import V\nclass Child(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.v = V", setup="self.child = Child()"),
    Way("decorated", "plain()", main="from pkg.consts import V\ndef deco(f):\n    @functools.wraps(f)\n    def inner(): return V\n    return inner\n@deco\ndef plain(): return 0"),
    Way("generator", "next(each())", main="from pkg.consts import V\ndef each():\n    yield V"),
)  # fmt: skip


def sources(kind: Kind, way: Way, *, after: bool) -> dict[str, str]:
    """Return the modules of a package whose model reads a value of ``kind`` by ``way``."""
    value = kind.after if after else kind.before
    definitions = kind.definitions.replace("{number}", "3" if after else "2")
    made = _IMPORTS + definitions

    def with_value(text: str) -> str:
        return text.replace("{value}", value)

    read = kind.read.replace("{v}", f"({way.reach})")
    lines = ["    " * 2 + line for line in (way.inside.splitlines() if way.inside else [])]
    setup = ["    " * 2 + line for line in (way.setup.splitlines() if way.setup else [])]
    main = "\n".join(
        [
            made if not way.consts else _IMPORTS,
            "BASES = ()",
            with_value(way.main),
            "class Net(nn.Module, *BASES):",
            "    def __init__(self):",
            "        super().__init__()",
            *setup,
            "    def forward(self, x):",
            *lines,
            f"        return x * ({read})",
            "def make(): return Net(), torch.linspace(1, 2, 3)",
        ]
    )
    consts = made + with_value(way.consts) if way.consts else ""
    return {"__init__.py": "", "consts.py": consts, "main.py": main}
