"""A compiled model: a module in the place of the one it was made from, whose calls keep a budget."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn

from gascompile.api.guards import refuse, untraced
from gascompile.api.module_state import SHARED, saved_state, stored_state
from gascompile.api.runner import Runner
from gascompile.bundles.files import Weights
from gascompile.core.kernels import FusedReport
from gascompile.core.model_libraries import methods
from gascompile.core.plan import Plan
from gascompile.core.program import Program
from gascompile.core.reports import GraphReport, RunReport

if TYPE_CHECKING:
    from gascompile.precision.report import FormatReport, MeasuredError

_log = logging.getLogger(__name__)
_CLASSES = 64
"""Of compiled models that are kept beside those of their models."""


class CompiledModel(nn.Module):
    """A model that runs within its budget. Call it as the module it was made from.

    It is of that module's class, too, and has its parts, parameters and attributes: what is set on one is set on
    both. Only calls of it as a whole are planned; its parts compute as they did. One plan per input signature; only
    the plan in use holds memory. Results are computed without gradients. Calls from several threads take turns.
    Close it, or use ``with``, to free its memory early.
    """

    _gascompile: Runner

    def __init__(self, runner: Runner) -> None:
        nn.Module.__init__(self)
        own = self.__dict__
        own["_gascompile"] = runner  # all that is ours is there: a model may use any other name
        if runner.planning is not None:
            given = vars(runner.planning.model)
            own.update({name: given[name] for name in SHARED})
            del own["training"]
        else:
            own["training"] = False

    @staticmethod
    def of(runner: Runner) -> CompiledModel:
        """Return the module for ``runner``, of the class of its model where there is one."""
        cls = CompiledModel
        if runner.planning is not None:
            model = runner.planning.model
            taken = sorted(
                _OURS & {*vars(model), *model._modules, *model._parameters, *model._buffers}
            )
            taken += sorted(_OURS & _names_of(type(model)))
            if taken:
                _log.warning(
                    "%s has a '%s' of its own, which what is compiled of it hides: it is no %s to isinstance and has "
                    "none of its methods",
                    type(model).__name__, taken[0], type(model).__name__,
                )  # fmt: skip
            else:
                cls = _class_beside(type(model))  # type: ignore[arg-type]  # classes can be hashed
        made = object.__new__(cls)
        CompiledModel.__init__(made, runner)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            BudgetExceededError: an op asked for more memory than the budget has, after states had changed.
            PlanMismatchError: the inputs have another shape, dtype, device or structure than planned, or, of a
                bundle, other strides.
            UnsupportedOpError: an input is no plain dense tensor; or an op of a bundle refuses the values it is given,
                for which a compiled model raises what the model does.
            StorageError: a weight could not be read; the compiled model stays usable.
            CompiledModelError: the model itself calls what was compiled from it.
        """
        return self._gascompile.call(args, kwargs)

    # ------------------------------------------------------------ plans and runs

    @property
    def plan(self) -> Plan:
        """The plan of the latest call, or of the example inputs before any call."""
        return self._gascompile.current().bundle.plan

    @property
    def program(self) -> Program:
        """The captured program that ``plan`` belongs to."""
        return self._gascompile.current().bundle.program

    @property
    def weights(self) -> Weights:
        """Where the weights of the program lie, by name, and the identity of their files."""
        return self._gascompile.current().bundle.weights

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The graph with its moves; ``graph_module.code`` shows the schedule as a program."""
        return self._gascompile.current().graph_module

    @property
    def last_run(self) -> RunReport | None:
        """What the latest call measured; ``None`` before the first one."""
        return self._gascompile.current().last_run

    @property
    def fused(self) -> FusedReport | None:
        """How many ops of ``plan`` run as compiled kernels, or why none does; ``None`` for ``fuse="off"``."""
        fusion = self._gascompile.current().fusion
        return fusion.report if fusion is not None else None

    @property
    def graphs(self) -> GraphReport | None:
        """How many ops of ``plan`` the latest call ran in CUDA graphs, or why none yet.

        ``None`` before the first call, for ``graphs="off"``, and where the machine has no GPU.
        """
        return self._gascompile.current().graph_report

    @property
    def format_report(self) -> FormatReport:
        """The form that every weight of ``plan`` moves in, its bytes, and what it lost.

        Raises:
            StorageError: a weight file cannot be read.
        """
        from gascompile.precision.report import format_report

        bundle = self._gascompile.current().bundle
        return format_report(bundle.program, bundle.weights)

    def measure_error(self, *args: Any, **kwargs: Any) -> MeasuredError:
        """Return how far the outputs are from those of the weights as stored, which run in the same budget.

        The plan for those is made at the first call and kept in the cache. Both runs get copies of the inputs and
        draw the same random numbers; buffers that calls change, and the random numbers to come, are put back.

        Raises:
            PlanMismatchError: the model was loaded from a bundle, which knows the rounded weights only; or the
                inputs are not as planned.
            InfeasiblePlanError: the budget is too small for the weights as they are stored.
            CheckpointError: the model wants another dtype than they are stored in.
        """
        return self._gascompile.measure_error(args, kwargs)

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """Buffers that calls mutate, by their name in the model. Writing to one changes the next call.

        A device mutates copies of them, and the model's own have the new values when the call returns.
        """
        self._gascompile.pull_states()
        return self._gascompile.current().bundle.held

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a bundle: plan, program, current states; weights by reference and content hash.

        Weights that came from no file of yours are part of the bundle. An older bundle is replaced, at once.

        Raises:
            PlanMismatchError: the model has changed since its latest call.
            StorageError: the folder cannot be written or holds something else than a bundle, or a weight file has
                changed.
        """
        self._gascompile.save(folder)

    def close(self) -> None:
        """Free the arena and close the weight files; calling the model again opens them again."""
        self._gascompile.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        units = self._gascompile.units
        names = {unit.bundle.program.name for unit in units} or {"not planned yet"}
        return f"CompiledModel({', '.join(sorted(names))}, {len(units)} plan(s))"

    # ------------------------------------------------------------ a module among others

    @property
    def device(self) -> torch.device:
        """Where ops compute; inputs may lie in RAM, too."""
        return self._gascompile.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating weight, as models of libraries tell it."""
        return next(iter(_float_dtypes(self)), torch.get_default_dtype())

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; a call under another one than planned captures it again.

        Raises:
            CompiledModelError: a bundle, which computes as it was captured, is to train.
        """
        if self._gascompile.planning is not None:
            self._gascompile.planning.model.train(mode)
        elif mode:
            refuse(
                "a bundle computes as it was captured and has no other mode",
                "Load it beside what is trained",
            )
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return this module, if it is as asked for: device and dtype are part of the plan.

        Raises:
            CompiledModelError: it is not.
        """
        return nn.Module.to(self, *args, **kwargs)

    def _apply(
        self,
        fn: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,  # noqa: ARG002 - of the method that this is in the place of
    ) -> Self:
        """What moves and converts modules changes nothing here, or is refused."""
        for dtype in _float_dtypes(self) or (torch.get_default_dtype(),):
            probe = torch.zeros(2, 2, 2, 2, dtype=dtype, device=self.device)
            applied = fn(probe)
            if applied.dtype != dtype or applied.device.type != self.device.type:
                refuse(
                    f"it computes with {dtype} on '{self.device}', and its plan has no other: {applied.dtype} on "
                    f"'{applied.device}' is asked for",
                    "Convert the model before gascompile.compile, or choose machine= for another device",
                )
            # What to_empty, share_memory and a memory_format do to a value.
            moved = applied.device.type == "cpu" and applied.is_shared()
            if moved or (applied is not probe and applied.device == probe.device):
                refuse(
                    "it reads weights where and as they were at compile: it would not see them emptied, shared or in "
                    "another order",
                    "Do that to the model before gascompile.compile",
                )
        return self

    def cuda(self, _device: Any = None) -> Self:
        """Return this module, if it computes on a GPU; raises ``CompiledModelError`` where it does not."""
        if self.device.type != "cuda":
            refuse(
                f"its plan computes on '{self.device}'", "Compile with a machine= that has a GPU"
            )
        return self

    def compile(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise ``CompiledModelError``: there is a plan already."""
        refuse("torch.compile would find no graph in it", "Compile the model that it was made from")

    def cpu(self) -> Self:
        """Return this module, if it computes in RAM; raises ``CompiledModelError`` where it does not."""
        return self.to("cpu")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return all values by name: of a model in memory its own, else maps of the files that they lie in.

        Raises:
            CheckpointError: a value lies in no file, or the file cannot be read.
            CompiledModelError: a bundle has a weight in a packed form alone.
        """
        runner = self._gascompile
        runner.pull_states()
        if runner.planning is None:
            return saved_state(runner.current().bundle, *args, **kwargs)
        return stored_state(runner.planning.model, runner.planning.open_checkpoint, *args, **kwargs)

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise ``CompiledModelError``: plans read weights from where they were."""
        refuse(
            "it reads weights from where they were at compile, and would not see others",
            "Load them into the model before gascompile.compile",
        )

    def _load_from_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self.load_state_dict()

    def register_full_backward_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise ``CompiledModelError``: calls have no backward pass."""
        refuse("it computes no gradients", "Train with gascompile.compile_step")

    register_full_backward_pre_hook = register_full_backward_hook
    register_backward_hook = register_full_backward_hook

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse(
            "a copy would hold all of its weights a second time",
            "Compile a copy of the model, or save() it and load() the bundle as often as needed",
        )

    def __copy__(self) -> NoReturn:
        self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(
            "its memory, files and threads belong to this process, so it cannot be pickled",
            "Save() it and load() the bundle, or save its state_dict()",
        )

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for kind in ("_parameters", "_buffers", "_modules"):
            entries = own.get(kind, {})
            if name in entries:
                return entries[name]
        planning = own["_gascompile"].planning if "_gascompile" in own else None
        if planning is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        value = getattr(planning.model, name)
        if isinstance(value, MethodType) and value.__self__ is planning.model:
            raise AttributeError(
                f"the compiled model has no method '{name}': call it on the model that was compiled"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if isinstance(getattr(CompiledModel, name, None), property):
            raise AttributeError(f"'{name}' of a compiled model cannot be set")
        if name == "forward" or name in own or own["_gascompile"].planning is None:
            own[name] = value
        else:
            setattr(own["_gascompile"].planning.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or self._gascompile.planning is None:
            object.__delattr__(self, name)
        else:
            delattr(self._gascompile.planning.model, name)

    def __dir__(self) -> list[str]:
        planning = self._gascompile.planning
        return sorted({*object.__dir__(self), *(dir(planning.model) if planning else ())})


_OURS = {name for name in vars(CompiledModel) if not name.startswith("_")}
_OURS -= {*dir(nn.Module), "device", "dtype", "of"}
"""Names that code of a model may not mean otherwise."""


def _names_of(cls: type) -> set[str]:
    """Return what a class adds to modules."""
    return {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}


untraced(CompiledModel.forward)


@functools.lru_cache(maxsize=_CLASSES)
def _class_beside(cls: type[nn.Module]) -> type[CompiledModel]:
    """Return a class of compiled models that is ``cls``, too, to ``isinstance`` and by name."""

    def forward(self: CompiledModel, *args: Any, **kwargs: Any) -> Any:
        return self._gascompile.call(args, kwargs)

    ours = {"forward": forward, **methods(cls)}
    for name, function in ours.items():
        # Libraries ask for signatures.
        functools.update_wrapper(function, getattr(cls, name))
    space = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    space |= ours | {"forward": untraced(ours["forward"]), "__call__": nn.Module.__call__}
    try:
        made = type(cls.__name__, (CompiledModel, cls), space)
    except Exception as error:  # noqa: BLE001 - a class may forbid others below it, or keep lists of them
        _log.warning("what is compiled of %s is none to isinstance: %s", cls.__name__, error)
        return CompiledModel
    assert issubclass(made, CompiledModel)
    return made


def _float_dtypes(module: nn.Module) -> tuple[torch.dtype, ...]:
    dtypes = dict.fromkeys(
        t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()
    )
    return tuple(dtypes)
