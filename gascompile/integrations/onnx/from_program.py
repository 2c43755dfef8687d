"""From a captured program to an ONNX graph, by torch's own exporter; each node knows the op that it stems from.

The exported program is built from the very graph that plans are made of, so that an op of a plan and the nodes that it
becomes are tied by what torch records of each rewrite, never by resemblance. Weights have no values here.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from gascompile.core.errors import CheckpointError, UnsupportedOpError, first_line_of
from gascompile.core.model_libraries import register_pytrees
from gascompile.core.program import Dim, Program, copied_graph
from gascompile.integrations.onnx.grouped_products import translations
from gascompile.passes.graph.mutated_tensors import mutated_tensors, written_inputs

if TYPE_CHECKING:
    import onnx_ir

DEFAULT_OPSET: Final = 23
"""The first with Attention and RMSNormalization, which keep ops whole that a plan has whole."""
OP: Final = "gascompile.op"
"""Key in a node's metadata: the op of the program that the node stems from."""
_FOLDED_BYTES: Final = 1024
"""Constants that are computed are sizes; larger ones are left to be computed, as the model does."""
_FX_NAME: Final = re.compile(r"%(\S+) : ")


def onnx_graph(
    program: Program, values: Mapping[str, torch.Tensor], *, opset: int = DEFAULT_OPSET
) -> onnx_ir.Model:
    """Return the graph of a program, in which weights are initializers without values, by their names.

    Args:
        program: as captured.
        values: of the tensors that the graph is to hold itself, by name.
        opset: of ONNX's ops.

    Raises:
        CheckpointError: the packages that this needs are not installed.
        UnsupportedOpError: torch's exporter cannot express the program; names the op.
    """
    require_exporter()
    _require_expressible(program)
    exported = exported_program(program)
    with _quiet():
        made = _exported(program.name, exported, opset)
    model: onnx_ir.Model = made.model
    if mutated := made.exported_program.graph_signature.buffers_to_mutate:
        raise _stateful(program.name, sorted(mutated.values())[0])
    _note_ops(model, made.exported_program.graph, exported.graph)
    for name, value in model.graph.initializers.items():
        if name in program.bound:
            value.const_value = _held(values[name], name) if name in values else None
    with _quiet():
        _simplified(model)
    _name_ends(model, program)
    return model


def require_exporter() -> None:
    """Refuse to write ONNX where the packages for it are missing; raises ``CheckpointError``."""
    try:
        import onnx  # noqa: F401
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"writing ONNX needs onnx, onnx_ir and onnxscript ({error}); install them with: "
            "pip install 'gascompile[onnx]'"
        ) from error


def _require_expressible(program: Program) -> None:
    graph = program.graph_module.graph
    if changed := mutated_tensors(graph, program.bindings):
        raise _stateful(program.name, min(changed))
    if written := written_inputs(program):
        raise UnsupportedOpError(
            f"{program.name} writes to its input '{min(written)}', which an ONNX graph cannot do; return the new value "
            "in place of that"
        )
    if program.forms:
        raise UnsupportedOpError(
            f"the weight '{min(program.forms)}' moves as {program.forms[min(program.forms)].wire}, which ONNX cannot "
            "say; leave out weights=, and export a model whose weights lie in safetensors files"
        )


def _stateful(model: str, name: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{model} changes '{name}' at each call, and an ONNX graph keeps nothing from call to call; make it an input "
        "and an output of the model"
    )


def exported_program(program: Program) -> ExportedProgram:
    """Return a program as ``torch.export`` has it, with the same nodes; weights have no values."""
    from torch._export.verifier import load_verifier
    from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature

    register_pytrees()
    graph = copied_graph(program.graph_module.graph)
    inputs, state = [], {}
    for node in graph.nodes:
        node.meta.pop("from_node", None)
        if node.op != "placeholder":
            continue
        name = program.bindings.get(node.name)
        if name is not None:
            state[name] = node.meta["val"]
            kind = InputKind.BUFFER
            inputs.append(InputSpec(kind, TensorArgument(node.name), name, persistent=True))
        else:
            inputs.append(InputSpec(InputKind.USER_INPUT, _input_argument(node), None))
    out_spec = pytree.treespec_loads(program.out_spec)
    returned = zip(output_names(out_spec), graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    outputs = [
        OutputSpec(OutputKind.USER_OUTPUT, _output_argument(program.name, name, value), None)
        for name, value in returned
    ]
    signature = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.treespec_loads(program.in_spec),
        out_spec=out_spec,
    )
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state,
        range_constraints=_ranges(program),
        module_call_graph=[ModuleCallEntry("", signature)],
        constants={},
        verifiers=[load_verifier("TRAINING")],
    )


def _input_argument(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return TensorArgument(node.name)
    return ConstantArgument(name=node.name, value=value)


def _output_argument(model: str, name: str, value: Any) -> Any:
    if isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
        return TensorArgument(value.name)
    if value is None:
        return ConstantArgument(name="", value=None)
    what = "a size" if isinstance(value, torch.fx.Node) else f"the constant {ascii(value)[:100]}"
    raise UnsupportedOpError(
        f"the output '{name}' of {model} is {what}, and an ONNX graph returns tensors alone; leave it out, or return a "
        "number as torch.tensor(number)"
    )


def _ranges(program: Program) -> dict[Any, Any]:
    """Return the range of every size that may change, by its symbol."""
    from torch.utils._sympy.value_ranges import ValueRanges

    nodes = {n.name: n for n in program.graph_module.graph.nodes if n.op == "placeholder"}
    ranges = {}
    for spec in program.inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, Dim):
                size = nodes[spec.name].meta["val"].shape[axis]
                ranges[size.node.expr] = ValueRanges(dim.minimum, dim.maximum)
    return ranges


def _exported(name: str, exported: ExportedProgram, opset: int) -> Any:
    try:
        # Without optimizing: weights have no values, and what fuses nodes hides which ops they stem from.
        made = torch.onnx.export(
            exported,
            dynamo=True,
            verbose=False,
            optimize=False,
            opset_version=opset,
            custom_translation_table=translations(exported.graph),
        )
    except torch.onnx.OnnxExporterError as error:
        raise UnsupportedOpError(
            f"torch's ONNX exporter cannot express {name}: {_reason(error)}; export the part of the model around it"
        ) from error
    if made is None or made.model.opset_imports.get("") != opset:
        raise UnsupportedOpError(
            f"torch's ONNX exporter cannot write {name} with the operator set {opset}; ask for {DEFAULT_OPSET}"
        )
    return made


def _reason(error: BaseException) -> str:
    """Return what an exporter's error is about: the innermost message, and the op that it names."""
    node = re.search(
        r"(?:when translating node|Error when calling function) (%\S+|'[^']*')", str(error)
    )
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
        node = node or re.search(r"when translating node (%\S+)", str(inner))
    text = first_line_of(inner)
    return f"{text} (at {node[1]})" if node and node[1] not in text else text


def _note_ops(model: onnx_ir.Model, decomposed: torch.fx.Graph, whole: torch.fx.Graph) -> None:
    """Note on each node the op of the program that it stems from; nothing where torch's record has none."""
    ops = {node.name: str(node.target) for node in whole.nodes if node.op == "call_function"}
    origins = {node.name: _origin(node, ops, id(whole)) for node in decomposed.nodes}
    for node in model.graph:
        said = _FX_NAME.match(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
        origin = origins.get(said[1]) if said else None
        # Lines of the user's code and folders of this machine are nobody's business.
        node.metadata_props.clear()
        if origin is not None:
            node.metadata_props[OP] = origin
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for node in model.graph:
        for value in node.outputs:
            value.metadata_props.clear()
    model.graph.metadata_props.clear()


def _origin(node: torch.fx.Node, ops: Mapping[str, str], graph_id: int) -> str | None:
    """Return the op that a node of a decomposed graph stems from, by the chain of what torch noted at each rewrite.

    ``None`` where the chain forks or ends elsewhere than in the graph of that id, at an op of that target.
    """
    sources: list[Any] = node.meta.get("from_node") or []
    source: Any = None
    while len(sources) == 1:
        source = sources[0]
        sources = source.from_node
    if sources or source is None or source.graph_id != graph_id:
        return None
    return source.name if ops.get(source.name) == source.target else None


def _held(value: torch.Tensor, name: str) -> Any:
    import onnx_ir

    plain = value.detach().cpu().contiguous()
    return onnx_ir.tensor(plain, name=name)


def _simplified(model: onnx_ir.Model) -> None:
    """Compute sizes that are constant and remove what nothing reads; no two nodes of different ops become one."""
    import onnx_ir
    from onnx_ir.passes import common
    from onnxscript import optimizer

    try:
        optimizer.fold_constants(
            model,
            onnx_shape_inference=True,
            input_size_limit=_FOLDED_BYTES,
            output_size_limit=_FOLDED_BYTES,
        )
        onnx_ir.passes.Sequential(
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common.RemoveUnusedOpsetsPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.DeduplicateInitializersPass(),
            common.OutputFixPass(),
            common.NameFixPass(),
        )(model)
    except onnx_ir.passes.PassError as error:
        raise UnsupportedOpError(
            f"the ONNX graph cannot be simplified: {_reason(error)}"
        ) from error


def _name_ends(model: onnx_ir.Model, program: Program) -> None:
    """Give inputs the names that the model has for them, and outputs those of the fields that they are."""
    given = [spec.name for spec in program.inputs if not spec.constant]
    returned = [
        name for name, value in zip(
            output_names(pytree.treespec_loads(program.out_spec)),
            program.graph_module.graph.output_node().args[0],  # type: ignore[arg-type]
            strict=True,
        ) if isinstance(value, torch.fx.Node)
    ]  # fmt: skip
    ends = [*model.graph.inputs, *model.graph.outputs]
    if len(given) != len(model.graph.inputs) or len(returned) != len(model.graph.outputs):
        raise UnsupportedOpError(
            f"{program.name} has {len(given)} inputs and {len(returned)} outputs, its ONNX graph "
            f"{len(model.graph.inputs)} and {len(model.graph.outputs)}"
        )
    taken = {str(name) for name in model.graph.initializers}
    inner = {id(value) for value in ends}
    values = [value for node in model.graph for value in node.outputs if id(value) not in inner]
    names = [_unused(name, taken) for name in (*given, *returned)]
    for value in (*ends, *values):
        if value.name in names:
            value.name = _unused(f"{value.name}_value", taken)
    for value, name in zip(ends, names, strict=True):
        value.name = name


def _unused(name: str, taken: set[str]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def output_names(spec: pytree.TreeSpec, prefix: str = "") -> list[str]:
    """Return a name for each leaf of what a model returns: its fields and places, joined by points."""
    if spec.is_leaf():
        return [prefix or "output"]
    keys = spec.context if isinstance(spec.context, list) else []
    if len(keys) != spec.num_children or not all(isinstance(key, str) for key in keys):
        keys = [
            str(number) if prefix else f"output.{number}" for number in range(spec.num_children)
        ]
    return [
        name
        for key, child in zip(keys, spec.children(), strict=True)
        for name in output_names(child, f"{prefix}.{key}" if prefix else key)
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the exporter says on the way: which packages it lacks, and what is about to change in torch."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
