# ruff: noqa: E501 - a table, of a line each
"""Edits to code and to the surroundings of a model, each as two texts of the module that makes it."""

from __future__ import annotations

from dataclasses import dataclass

_HEAD = """
import abc, builtins, contextlib, contextvars, dataclasses, enum, functools, importlib, os, pathlib, random, resource
import sqlite3, sys, threading, time, types, typing
import numpy, torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
"""


@dataclass(frozen=True, slots=True)
class CodeEdit:
    """A module before and after; ``make()`` returns the model and its input, ``undo()`` cleans up."""

    name: str
    before: str
    after: str

    def sources(self, *, after: bool) -> dict[str, str]:
        """Return the modules of the package."""
        text = _HEAD + (self.after if after else self.before)
        if "def make" not in text:
            text += "\ndef make(): return Net(), torch.linspace(-1, 2, 4)\n"
        if "def undo" not in text:
            text += "\ndef undo(): pass\n"
        return {"__init__.py": "", "main.py": text}


def _net(body: str, before: str = "", setup: str = "") -> str:
    made = "".join(f"        {line}\n" for line in setup.splitlines())
    init = f"    def __init__(self):\n        super().__init__()\n{made}" if setup else ""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"{before}\nclass Net(nn.Module):\n{init}    def forward(self, x):\n{lines}"


def _both(name: str, text: str, before: str = "2.0", after: str = "3.0") -> CodeEdit:
    return CodeEdit(name, text.replace("#", before), text.replace("#", after))


def _patched(name: str, place: str, function: str, use: str) -> CodeEdit:
    """Return the edit that puts a function of the program in a library's place."""
    plain = _net(
        f"return {use}",
        setup="self.layer = nn.Linear(4, 4, bias=False)\nnn.init.ones_(self.layer.weight)",
    )
    owner, _, attribute = place.rpartition(".")
    patch = f"{plain}\nOLD = {place}\ndef put({function}\nOWNER = {owner}\nOWNER.{attribute} = put\ndef undo(): OWNER.{attribute} = OLD\n"
    return CodeEdit(f"patched {name}", plain, patch)


EDITS = (
    _both("constant in forward", _net("return x * #")),
    _both("operator", _net("return x # 2"), "+", "*"),
    _both("function called", _net("return torch.#(x)"), "relu", "tanh"),
    _both("method called", _net("return x.#()"), "relu", "tanh"),
    _both("keyword", _net("return torch.sum(x, dim=0, keepdim=#)"), "True", "False"),
    _both("helper", _net("return helper(x)", "def helper(x): return x * #")),
    _both("helper of a helper", _net("return f(x)", "def f(x): return g(x)\ndef g(x): return x * #")),
    _both("inner function", _net("def inner(y): return y * #\nreturn inner(x)")),
    _both("lambda", _net("return (lambda y: y * #)(x)")),
    _both("comprehension", _net("return sum([x * k for k in (1.0, #)])")),
    _both("loop", _net("for _ in range(#): x = x * 2\nreturn x"), "2", "3"),
    _both("branch", _net("return x * 2 if x.shape[0] > # else x"), "2", "5"),
    _both("default argument", _net("return h(x)", "def h(x, k=#): return x * k")),
    _both("named default", _net("return h(x)", "def h(x, *, k=#): return x * k")),
    _both("argument order", _net("return h(x, 2.0)", "def h(#): return a - b * 2"), "a, b", "b, a"),
    _both("decorator", _net("return h(x)", "def d(f):\n    def g(x): return f(x) * #\n    return g\n@d\ndef h(x): return x")),
    _both("decorator with an argument", _net("return h(x)", "def d(k):\n    def e(f):\n        return lambda x: f(x) * k\n    return e\n@d(#)\ndef h(x): return x")),
    _both("property", _net("return x * self.k").replace("    def forward", "    @property\n    def k(self): return #\n    def forward")),
    _both("static method", _net("return self.k(x)").replace("    def forward", "    @staticmethod\n    def k(x): return x * #\n    def forward")),
    _both("class method", _net("return self.k(x)").replace("    def forward", "    @classmethod\n    def k(cls, x): return x * #\n    def forward")),
    _both("class attribute", _net("return x * self.k").replace("    def forward", "    k = #\n    def forward")),
    _both("base class", "class Base(nn.Module):\n    def k(self): return #\n" + _net("return x * self.k()").replace("(nn.Module)", "(Base)")),
    _both("order of bases", "class A:\n    k = 2.0\nclass B:\n    k = 3.0\n" + _net("return x * self.k").replace("(nn.Module)", "(nn.Module, #)"), "A, B", "B, A"),
    _both("super call", "class Base(nn.Module):\n    def forward(self, x): return x * #\n" + _net("return super().forward(x)").replace("(nn.Module)", "(Base)")),
    _both("metaclass", "class Meta(type):\n    k = #\n" + _net("return x * type(self).k").replace("(nn.Module)", "(nn.Module, metaclass=Meta)")),
    _both("__getattr__", _net("return x * self.zzz").replace("    def forward", "    def __getattr__(self, n): return # if n == 'zzz' else super().__getattr__(n)\n    def forward")),
    _both("module __getattr__", _net("return x * getattr(sys.modules[__name__], 'zzz')", "def __getattr__(n): return #")),
    _both("operator method", _net("return x * float(K() + 1)", "class K:\n    def __add__(self, o): return #")),
    _both("context manager", _net("with cm() as k:\n    return x * k", "@contextlib.contextmanager\ndef cm():\n    yield #")),
    _both("generator", _net("return x * sum(g())", "def g():\n    yield 1.0\n    yield #")),
    _both("single dispatch", _net("return h(x)", "@functools.singledispatch\ndef h(x): return x\n@h.register\ndef _(x: torch.Tensor): return x * #")),
    _both("dispatch table", _net("return T['a'](x)", "T = {'a': lambda x: x * #}")),
    _both("exec", _net("return h(x)", "exec('def h(x): return x * #')")),
    _both("text that is evaluated", _net("return x * eval(TEXT)", "TEXT = '#'")),
    _both("child's class", _net("return self.c(x)", "", "self.c = nn.#()"), "ReLU", "Tanh"),
    _both("child's option", _net("return self.c(x)", "", "self.c = nn.LeakyReLU(#)"), "0.1", "0.2"),
    _both("activation in an attribute", _net("return self.f(x)", "", "self.f = torch.#"), "relu", "tanh"),
    _both("order of children", _net("for c in self.children(): x = c(x)\nreturn x", "class A(nn.Module):\n    def forward(self, x): return x * 2\nclass B(nn.Module):\n    def forward(self, x): return x + 1", "#"), "self.a, self.b = A(), B()", "self.b, self.a = B(), A()"),
    _both("order of a Sequential", _net("return self.s(x)", "", "self.s = nn.Sequential(#)"), "nn.ReLU(), nn.Sigmoid()", "nn.Sigmoid(), nn.ReLU()"),
    _both("child that is None", _net("return x if self.c is None else self.c(x)", "", "self.c = #"), "None", "nn.Tanh()"),
    _both("training flag", _net("return x * 2 if self.training else x") + "def make(): return Net().train(#), torch.ones(3)\n", "True", "False"),
    _both("dropout's mode", _net("return self.d(x)", "", "self.d = nn.Dropout(0.5)") + "def make(): return Net().train(#), torch.ones(64)\n", "True", "False"),
    _both("forward hook", _net("return x") + "def make():\n    m = Net()\n    m.register_forward_hook(lambda m, a, o: o * #)\n    return m, torch.ones(3)\n"),
    _both("forward pre-hook", _net("return x") + "def make():\n    m = Net()\n    m.register_forward_pre_hook(lambda m, a, k: (tuple(v * # for v in a), {n: v * # for n, v in k.items()}), with_kwargs=True)\n    return m, torch.ones(3)\n"),
    _both("hook of a child", _net("return self.c(x)", "", "self.c = nn.Identity()") + "def make():\n    m = Net()\n    m.c.register_forward_hook(lambda m, a, o: o * #)\n    return m, torch.ones(3)\n"),
    _both("hook of all modules", _net("return x") + "from torch.nn.modules.module import register_module_forward_hook as reg\ndef make():\n    global H\n    H = reg(lambda m, a, o: o * # if type(m) is Net else None)\n    return Net(), torch.ones(3)\ndef undo(): H.remove()\n"),
    _both("number of hooks", _net("return x", "def h(m, a, o): return o * 2") + "def make():\n    m = Net()\n    for _ in range(#): m.register_forward_hook(h)\n    return m, torch.ones(3)\n", "1", "2"),
    _both("forward of an instance", _net("return x") + "def make():\n    m = Net()\n    m.forward = lambda x: x * #\n    return m, torch.ones(3)\n"),
    _both("method set on a class", _net("return self.k(x)") + "def k(self, x): return x * #\nNet.k = k\n"),
    _both("global set later", _net("return x * K", "K = 1.0") + "K = #\n"),
    _both("global of another module", _net("return x * H.k", "H = types.ModuleType('made')\nH.k = #")),
    _both("parametrization", _net("return self.c(x)", "class P(nn.Module):\n    def forward(self, w): return w * #", "self.c = nn.Linear(4, 4)\nnn.init.ones_(self.c.weight)\nnn.init.ones_(self.c.bias)\nparametrize.register_parametrization(self.c, 'weight', P())")),
    _both("subclass of a tensor", _net("return (x * K).as_subclass(torch.Tensor) if False else x * K.k", "class T(torch.Tensor):\n    k = #\nK = torch.ones(1).as_subclass(T)")),
    _both("virtual subclass", _net("return x * 2 if isinstance(K(), Base) else x", "class Base(abc.ABC): pass\nclass K: pass\n#"), "Base.register(K)", "pass"),
    _both("enum", _net("return x * C.A.value", "class C(enum.Enum):\n    A = #")),
    _both("environment variable", _net("return x * float(os.environ['STALE_K'])") + "os.environ['STALE_K'] = '#'\ndef undo(): os.environ.pop('STALE_K')\n"),
    _both("os.getenv", _net("return x * float(os.getenv('STALE_K', '1'))") + "os.environ['STALE_K'] = '#'\ndef undo(): os.environ.pop('STALE_K')\n"),
    _both("variable that is there", _net("return x * 2 if 'STALE_K' in os.environ else x") + "#\ndef undo(): os.environ.pop('STALE_K', None)\n", "pass", "os.environ['STALE_K'] = '1'"),
    _both("environ as a name", _net("return x * float(E['STALE_K'])", "from os import environ as E") + "os.environ['STALE_K'] = '#'\ndef undo(): os.environ.pop('STALE_K')\n"),
    _both("arguments of the program", _net("return x * len(sys.argv)") + "sys.argv.extend(['a'] * #)\ndef undo(): del sys.argv[-#:]\n", "1", "2"),
    _both("file", _net("with open(PATH) as f:\n    return x * float(f.read())", "PATH = os.path.join(os.path.dirname(__file__), 'k.txt')") + "pathlib.Path(PATH).write_text('#')\n"),
    _both("file by pathlib", _net("return x * float(PATH.read_text())", "PATH = pathlib.Path(__file__).with_name('k.txt')") + "PATH.write_text('#')\n"),
    _both("numpy file", _net("return x * float(numpy.load(PATH)[0])", "PATH = os.path.join(os.path.dirname(__file__), 'k.npy')") + "numpy.save(PATH, numpy.array([#]))\n"),
    _both("working folder", _net("return x * len(os.getcwd())", "OLD = os.getcwd()") + "os.chdir('#')\ndef undo(): os.chdir(OLD)\n", "/", "/tmp"),
    _both("random number", _net("return x * random.random()") + "random.seed(#)\n"),
    _both("generator of random numbers", _net("return x * R.random()", "R = random.Random(#)")),
    _both("numpy's random number", _net("return x * float(numpy.random.rand())") + "numpy.random.seed(#)\n", "2", "3"),
    _both("numpy's generator", _net("return x * float(R.random())", "R = numpy.random.default_rng(#)"), "2", "3"),
    _both("clock", _net("return x * (time.time() % 7 + #)")),
    _both("iterator", _net("return x * next(I)", "I = iter([#, 5.0, 6.0, 7.0, 8.0])")),
    _both("default dtype", _net("return x * torch.tensor(2.0).dtype.itemsize") + "torch.set_default_dtype(torch.#)\ndef undo(): torch.set_default_dtype(torch.float32)\ndef make(): return Net(), torch.ones(3, dtype=torch.float32)\n", "float32", "float64"),
    _both("deterministic mode", _net("return x * (2 if torch.are_deterministic_algorithms_enabled() else 3)") + "torch.use_deterministic_algorithms(#)\ndef undo(): torch.use_deterministic_algorithms(False)\n", "True", "False"),
    _both("autocast", _net("return x @ x.T.contiguous() if x.dim() > 1 else x * torch.is_autocast_enabled('cpu')") + "C = torch.autocast('cpu', enabled=#)\nC.__enter__()\ndef undo(): C.__exit__(None, None, None)\n", "True", "False"),
    _both("function mode", _net("return torch.relu(x)", "class M(torch.overrides.TorchFunctionMode):\n    def __torch_function__(self, f, t, a=(), k=None):\n        r = f(*a, **(k or {}))\n        return r * # if f is torch.relu else r") + "C = M()\nC.__enter__()\ndef undo(): C.__exit__(None, None, None)\n"),
    _both("abstract impl of a custom op", _net("return torch.ops.stale.k(x) * 1.0", "L = torch.library.Library('stale', 'FRAGMENT')\nL.define('k(Tensor x) -> Tensor')\ndef fake(x): return x.new_empty(x.shape[0] * #)\ntorch.library.register_fake('stale::k', fake, lib=L)\ntorch.library.impl('stale::k', 'CPU', lambda x: x.repeat(#), lib=L)") + "def undo(): L._destroy()\n", "2", "3"),
    _both("autograd function", _net("return K.apply(x)", "class K(torch.autograd.Function):\n    @staticmethod\n    def forward(c, x): return x * #\n    @staticmethod\n    def backward(c, g): return g")),
    _patched("F.relu", "F.relu", "x): return x * 3", "F.relu(x)"),
    _patched("torch.relu", "torch.relu", "x): return x * 3", "torch.relu(x)"),
    _patched("Tensor.relu", "torch.Tensor.relu", "x): return x * 3", "x.relu()"),
    _patched("nn.Linear.forward", "nn.Linear.forward", "self, x): return x * 3", "self.layer(x)"),
    _patched("F.linear under a layer", "F.linear", "x, w, b=None): return x * 3", "self.layer(x)"),
    _patched("F.silu under a layer", "F.silu", "x, inplace=False): return x * 3", "nn.SiLU()(x)"),
    CodeEdit("library function for another", _net("return nn.GELU()(x)"), _net("return nn.GELU()(x)") + "OLD = nn.GELU.forward\nnn.GELU.forward = nn.ReLU.forward\nnn.ReLU.inplace = False\nnn.GELU.inplace = False\ndef undo():\n    nn.GELU.forward = OLD\n    del nn.GELU.inplace\n    del nn.ReLU.inplace\n"),
    CodeEdit("library function swapped in its module", _net("return nn.SiLU()(x)"), _net("return nn.SiLU()(x)") + "OLD = F.silu\nF.silu = F.mish\ndef undo(): F.silu = OLD\n"),
    _both("attribute of a library's class", _net("return x * nn.Identity.stale") + "nn.Identity.stale = #\ndef undo(): del nn.Identity.stale\n"),
    _both("global of a library", _net("return x * F.stale") + "F.stale = #\ndef undo(): del F.stale\n"),
    _both("annotation", _net("return x * f.__annotations__['a']", "def f(a: #): pass")),
    _both("annotation with metadata", _net("return x * typing.get_type_hints(f, include_extras=True)['a'].__metadata__[0]", "def f(a: typing.Annotated[int, #]): pass")),
    _both("annotation of a class", _net("return x * T.__annotations__['k']().v", "class A: v = #\nclass T:\n    k: A")),
    _both("annotation in brackets", _net("return x * T.__annotations__['k'].__args__[0].v", "class A: v = #\nclass T:\n    k: list[A]")),
    _both("metadata of a field", _net("return x * dataclasses.fields(T)[0].metadata['m']", "@dataclasses.dataclass\nclass T:\n    k: float = dataclasses.field(default=1, metadata={'m': #})")),
    _both("number of subclasses", _net("return x * len(B.__subclasses__())", "class B: pass\nKEEP = [type('S', (B,), {}) for _ in range(#)]"), "1", "2"),
    _both("bases", _net("return x * len(T.__bases__)", "class A: pass\nclass B(A): pass\nclass T(#): pass"), "B", "B, A"),
    _both("class of values of a thread", _net("return x * L.k", "class LL(threading.local):\n    k = #\nL = LL()")),
    _both("default of a context variable", _net("return x * V.get()", "V = contextvars.ContextVar('V', default=#)")),
    _both("own builtin", _net("return x * OWN_BUILTIN", "builtins.OWN_BUILTIN = #") + "def undo(): del builtins.OWN_BUILTIN\n"),
    _both("builtins of a function", _net("return x * f()", "def g(): return KK\nf = types.FunctionType(g.__code__, {'__builtins__': {'KK': #}})")),
    _both("class of a module", _net("import own_module\nreturn x * own_module.k", "class M(types.ModuleType):\n    k = #\nsys.modules['own_module'] = M('own_module')") + "def undo(): sys.modules.pop('own_module')\n"),
    _both("open descriptor", _net("return x * float(os.pread(FD, 3, 0))", "PATH = __file__ + '.k'\npathlib.Path(PATH).write_text('#')\nFD = os.open(PATH, os.O_RDONLY)") + "def undo(): os.close(FD)\n"),
    _both("database", _net("return x * sqlite3.connect(PATH).execute('select k from t').fetchone()[0]", "PATH = __file__ + '.db'\nwith sqlite3.connect(PATH) as db:\n    db.execute('drop table if exists t')\n    db.execute('create table t (k real)')\n    db.execute('insert into t values (#)')")),
    _both("event", _net("return x * (2.0 if E.is_set() else 3.0)", "E = threading.Event()\nif #: E.set()"), "False", "True"),
    _both("attribute of a model named as torch's", _net("return x * self._version", setup="self._version = #")),
    _both("class in brackets", _net("return x * B.k", "T = typing.TypeVar('T')\nclass Box(typing.Generic[T]): k = #\nB = Box[int]")),
    _both("attribute named as torch's", _net("return x * S._version", "class S: pass\nS = S()\nS._version = #")),
    _both("keys named as hooks", _net("return x * next(iter(S.my_hooks))", "class S: pass\nS = S()\nS.my_hooks = {#: len}")),
    _both("strides of an array", _net("return x * torch.from_numpy(A).stride()[0]", "A = numpy.ones((2, 2), order='#')"), "C", "F"),
    _both("class of a path", _net("return x * P.k", "class Own(type(pathlib.Path())):\n    k = #\nP = Own('a')")),
    _both("own object in a library", _net("return x * torch.own_object.k", "class S: pass\ntorch.own_object = S()\ntorch.own_object.k = #") + "def undo(): del torch.own_object\n"),
)  # fmt: skip
