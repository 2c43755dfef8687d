# ruff: noqa: E501 - a table, of a line each
"""Edits to a training script, each as two texts of the module that makes model, loss, optimizer and batches."""

from __future__ import annotations

from dataclasses import dataclass

_SCRIPT = """
import functools, os
import torch
from torch import nn
from torch.nn import functional as F

K = 2.0
OLD = []
W1, W2 = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 1.0, 1.0])
LIST = []

class Times(torch.autograd.Function):
    @staticmethod
    def forward(c, x): return x * 2
    @staticmethod
    def backward(c, g): return g * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.k, self.act = 1.5, torch.relu
    def forward(self, x):
        x = self.drop(self.norm(self.act(self.first(x))))
        x = self.mid(x)
        return self.last(x) * self.k

def helper(y): return y * 1.0 * K
def loss(model, batch):
    y = helper(model(batch))
    # body
    # used
    return y.square().mean()

def make():
    torch.manual_seed(0)
    model, fn, options = Net(), loss, {}
    LIST[:] = [model.first.bias, model.mid.bias]
    batches = [torch.randn(4, 6) for _ in range(2)]
    # setup
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    # last
    return model, fn, optimizer, batches, options

def undo():
    os.environ.pop('STALE_STEP', None)
    if OLD: F.gelu = OLD[0]
    if 'L' in globals(): L._destroy()
"""


@dataclass(frozen=True, slots=True)
class StepEdit:
    """What is replaced in the script: before the edit, and by the edit in its place."""

    name: str
    place: str
    before: str
    after: str
    is_kept: bool = False
    """Whether the plan from before is used: what differs is read anew by every step."""
    used: str = "y"
    """What the loss is made of."""

    def sources(self, *, after: bool) -> dict[str, str]:
        """Return the modules of the package."""
        assert _SCRIPT.count(self.place) == 1, self.place
        text = _SCRIPT.replace(self.place, self.after if after else self.before)
        text = text.replace("# used", f"y = {self.used}")
        return {"__init__.py": "", "main.py": text}


def _edit(name: str, before: str, after: str, *, is_kept: bool = False) -> StepEdit:
    """Return the edit of a text that stands in the script."""
    return StepEdit(name, before, before, after, is_kept)


def _line(
    name: str,
    place: str,
    text: str,
    before: str,
    after: str,
    *,
    is_kept: bool = False,
    used: str = "y",
) -> StepEdit:
    """Return the edit of a line in a place that is marked in the script; ``#`` in it is what is edited."""
    return StepEdit(name, place, text.replace("#", before), text.replace("#", after), is_kept, used)


_BODY, _SETUP, _LAST = "# body", "# setup", "# last"
_AT_CLASS = "class Net(nn.Module):"
_OP = """
L = torch.library.Library('stale_step', 'FRAGMENT')
L.define('k(Tensor x) -> Tensor')
torch.library.register_fake('stale_step::k', lambda x: torch.empty_like(x), lib=L)
torch.library.impl('stale_step::k', 'CPU', lambda x: x.clone(), lib=L)
torch.library.register_autograd('stale_step::k', lambda c, g: g * #, lib=L)
"""

EDITS = (
    _edit("loss", "y.square().mean()", "y.abs().mean()"),
    _edit("helper", "return y * 1.0", "return y * 3.0"),
    _edit("global constant", "K = 2.0", "K = 3.0"),
    _line("constant in the loss", _BODY, "y = y * #", "1.5", "2.5"),
    _line("constant tensor", _BODY, "y = y * torch.tensor([1.0, 2.0, #])", "3.0", "4.0"),
    _edit("activation", "torch.relu", "torch.tanh"),
    _edit("attribute", "self.k, self.act = 1.5", "self.k, self.act = 2.5"),
    _edit("dropout", "nn.Dropout(0.1)", "nn.Dropout(0.5)"),
    _edit("no dropout", "nn.Dropout(0.1)", "nn.Dropout(0.0)"),
    _edit("momentum of a norm", "nn.BatchNorm1d(8)", "nn.BatchNorm1d(8, momentum=0.5)"),
    _edit("cumulative norm", "nn.BatchNorm1d(8)", "nn.BatchNorm1d(8, momentum=None)"),
    _line("norm in evaluation mode", _SETUP, "model.norm.train(#)", "True", "False"),
    _line("model in evaluation mode", _SETUP, "model.train(#)", "True", "False"),
    _line("frozen layer", _SETUP, "model.mid.requires_grad_(#)", "True", "False"),
    _line("frozen parameter", _SETUP, "model.first.bias.requires_grad_(#)", "True", "False"),
    _line("other frozen parameter", _SETUP, "model.#.bias.requires_grad_(False)", "first", "mid"),
    _line("tied weights", _SETUP, "model.more = nn.Linear(8, 8)\n    model.more.weight = nn.Parameter(model.mid.weight.detach().clone())\n    if #: model.more.weight = model.mid.weight\n    fn = lambda m, b: loss(m, b) + m.more(m.first(b)).mean()", "False", "True"),
    _line("learning rate", _LAST, "optimizer.param_groups[0]['lr'] = #", "1e-2", "3e-2", is_kept=True),
    _line("betas", _LAST, "optimizer.param_groups[0]['betas'] = (0.9, #)", "0.99", "0.9", is_kept=True),
    _line("maximise", _LAST, "optimizer.param_groups[0]['maximize'] = #", "False", "True", is_kept=True),
    _line("optimizer", _LAST, "optimizer = torch.optim.#(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)", "AdamW", "Adam"),
    _line("other optimizer", _LAST, "optimizer = torch.optim.#(model.parameters(), lr=1e-2, fused=True)", "AdamW", "SGD"),
    _line("momentum", _LAST, "optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=#, fused=True)", "0.0", "0.9"),
    _line("nesterov", _LAST, "optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=#, fused=True)", "False", "True", is_kept=True),
    _line("groups", _LAST, "a, b = list(model.first.parameters()), [*model.mid.parameters(), *model.norm.parameters(), *model.last.parameters()]\n    a, b = (a, b) if # else (b, a)\n    optimizer = torch.optim.AdamW([{'params': a, 'lr': 1e-2}, {'params': b, 'lr': 5e-2}], fused=True)", "True", "False"),
    _line("parameters of the optimizer", _LAST, "optimizer = torch.optim.AdamW(model.#.parameters(), lr=1e-2, fused=True)", "first", "mid"),
    _line("state of the optimizer", _LAST, "for _ in range(#):\n        fn(model, batches[0]).backward()\n        optimizer.step()\n        optimizer.zero_grad()", "1", "2", is_kept=True),
    _edit("rows of a batch", "torch.randn(4, 6)", "torch.randn(5, 6)"),
    _edit("strides of a batch", "torch.randn(4, 6)", "torch.randn(6, 4).t()"),
    _line("type of a batch", _SETUP, "batches = [b.to(torch.#) for b in batches]\n    fn = lambda m, b: loss(m, b.float())", "float32", "bfloat16"),
    _line("value in a batch", _SETUP, "batches = [(b, #) for b in batches]\n    fn = lambda m, b: loss(m, b[0] * b[1])", "1.0", "2.0"),
    _line("clipping", _SETUP, "options['max_grad_norm'] = #", "0.1", "0.2"),
    _line("accumulation", _SETUP, "options['accumulate'] = #", "1", "2"),
    _line("tensor outside", _BODY, "y = y * #", "W1", "W2"),
    StepEdit("values of a tensor outside", "W1, W2 = torch.tensor([1.0, 2.0, 3.0])", "W1, W2 = torch.tensor([1.0, 2.0, 3.0])", "W1, W2 = torch.tensor([1.0, 5.0, 3.0])", is_kept=True, used="y * W1"),
    _line("parameter met outside", _BODY, "y = y + LIST[#].sum()", "0", "1"),
    _line("view met outside", _SETUP, "V = model.#.bias.view(2, 4)\n    fn = lambda m, b: loss(m, b) + V.sum()", "first", "mid"),
    _line("backward pass of a function", _AT_CLASS, "class Twice(Times):\n    @staticmethod\n    def backward(c, g): return g * #\n" + _AT_CLASS, "2", "3", used="Twice.apply(y)"),
    _line("variable read in a backward pass", _AT_CLASS, "os.environ['STALE_STEP'] = '#'\nclass Twice(Times):\n    @staticmethod\n    def backward(c, g): return g * float(os.environ['STALE_STEP'])\n" + _AT_CLASS, "2", "3", used="Twice.apply(y)"),
    _line("hook on a gradient", _BODY, "y.register_hook(lambda g: g * #)", "2", "3"),
    _line("variable read in a hook", _AT_CLASS, "os.environ['STALE_STEP'] = '#'\ndef hooked(y):\n    y.register_hook(lambda g: g * float(os.environ['STALE_STEP']))\n    return y\n" + _AT_CLASS, "2", "3", used="hooked(y)"),
    _line("hook on a module's gradient", _SETUP, "model.mid.register_full_backward_hook(lambda m, i, o: (i[0] * #,))", "2", "3"),
    _line("hook before a module", _SETUP, "model.mid.register_forward_pre_hook(lambda m, a, k: ((a[0] * #,), k), with_kwargs=True)", "2", "3"),
    _line("hook of a module", _SETUP, "model.mid.register_forward_hook(lambda m, a, o: o * #)", "2", "3"),
    _line("gradient of an op", _AT_CLASS, _OP + _AT_CLASS, "2", "3", used="torch.ops.stale_step.k(y)"),
    _edit("detached", "x = self.mid(x)", "x = self.mid(x.detach())"),
    _line("without gradient", _BODY, "with torch.set_grad_enabled(#):\n        z = model.mid.weight.sum() * 2\n    y = y + z", "True", "False"),
    _line("autocast", _BODY, "with torch.autocast('cpu', dtype=torch.bfloat16, enabled=#):\n        y = y @ model.last.weight", "False", "True"),
    _line("object as loss", _SETUP, "class Loss:\n        def __init__(self, k): self.k = k\n        def __call__(self, m, b): return loss(m, b) * self.k\n    fn = Loss(#)", "1.0", "2.0"),
    _line("bound argument", _SETUP, "fn = functools.partial(lambda k, m, b: loss(m, b) * k, #)", "1.0", "2.0"),
    _line("closure", _SETUP, "k = #\n    fn = lambda m, b: loss(m, b) * k", "1.0", "2.0"),
    _line("forward of an instance", _SETUP, "model.forward = lambda x: Net.forward(model, x) * #", "1", "2"),
    _line("function of torch", _SETUP, "OLD.append(F.gelu)\n    if #: F.gelu = lambda x: x * 3\n    model.act = lambda x: F.gelu(x)", "0", "1"),
)  # fmt: skip
