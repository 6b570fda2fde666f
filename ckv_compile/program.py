"""Programs as .pt2 files, written by torch.export and read without it.

A program is a graph of (weight_0, weight_1, ..., input_ids, *state): its weights are inputs, by their number in a table
that all programs of a model share, and no file of a program holds one.

The file is what `torch.export.save` writes, and `torch.export.load` would take it. That unpickles what a file says is
pickled, evaluates its strings as Python, and rebuilds the symbolic shape of every node, which for 30 layers takes 5 s.
A program needs its nodes alone, and those are plain JSON: `read` takes 0.2 s, and its graph calls nothing but operators
of a few libraries, and none that could be given the name of a file.
"""

import io
import json
import math
import operator
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.inductor_prims  # registers operators of `reduce_linear`
from torch import Tensor, nn
from torch._export.serde.serialize import (
    _SERIALIZE_TO_TORCH_DTYPE,
    _SERIALIZE_TO_TORCH_LAYOUT,
    _SERIALIZE_TO_TORCH_MEMORY_FORMAT,
)
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph_module import _get_attr

from ckv_compile.cache import CacheState
from ckv_compile.errors import ArtifactError

INPUTS = ("input_ids", *CacheState._fields)
"""The inputs of a program behind its weights."""

_EXAMPLE_STEPS = 16
_SCHEMA = 8  # of torch's JSON
_MEMBERS: dict[str, object] = {  # of the archive: what each must hold, or None
    "models/model.json": None,
    "data/weights/model_weights_config.json": {"config": {}},
    "data/constants/model_constants_config.json": {"config": {}},
    "data/sample_inputs/model.pt": b"",
    "archive_format": None,
    "archive_version": None,
    "byteorder": None,
    ".data/version": None,
    ".data/serialization_id": None,
}
_ON_SIZES: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv", "eq", "ne", "lt", "le", "gt", "ge")
} | {"torch.sym_max": torch.sym_max, "torch.sym_min": torch.sym_min, "math.ceil": math.ceil, "math.trunc": math.trunc}
_LIBRARIES = ("aten", "prims", "ckv", "torchao", "transformers")  # torchao: quantised weights; transformers: experts
_SETTINGS = {  # the strings of operators that choose how to compute; any other might name a file
    "approximate",
    "assert_msg",
    "equation",
    "indexing",
    "mapping_type",
    "mode",
    "norm",
    "padding",
    "reduce",
    "rounding_mode",
    "side",
}


class Weight(NamedTuple):
    """A parameter or buffer of a graph, and its name there."""

    name: str
    tensor: Tensor


class Input(NamedTuple):
    """What a program takes at one place: None stands for a size that is free."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]


class StoredProgram(NamedTuple):
    """A program as it was read: its graph, and what it takes, in order."""

    graph: Graph
    inputs: dict[str, Input]


def weights_of(graph: GraphModule) -> list[Weight]:
    """The parameters and buffers of a graph, in its own order, each under one name."""
    return [Weight(name, tensor) for name, tensor in (*graph.named_parameters(), *graph.named_buffers())]


def identity(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors that are one and the same memory share."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def export(graph: GraphModule, weights: Sequence[Weight], state: CacheState, steps: int | None) -> ExportedProgram:
    """Make the program of a graph of (input_ids, *state).

    Args:
        graph: reads no tensor but the weights.
        weights: the table that its weights are numbered by.
        state: an example of the state, of two rows or more if the batch size is to be free.
        steps: tokens of a row; None leaves it, and the batch size, free.
    """
    table: dict[tuple[object, ...], int] = {}
    for number, weight in enumerate(weights):
        table.setdefault(identity(weight.tensor), number)
    lifted = _lift(graph, table, len(weights))
    free = None if steps else Dim.DYNAMIC
    ids = torch.zeros(state.fill.shape[0], steps or _EXAMPLE_STEPS, dtype=torch.int64, device=state.fill.device)
    # Contiguous, as they will be when they are loaded: a compiled package relies on it.
    arguments = (*(weight.tensor.detach().contiguous() for weight in weights), ids, *state)
    shapes = (*([None] * len(weights)), {0: free, 1: free}, *({0: free} for _ in state))
    with torch.no_grad():
        return torch.export.export(lifted, arguments, dynamic_shapes=shapes if free else None, strict=False)


def to_bytes(program: ExportedProgram) -> bytes:
    """The .pt2 file of a program, without examples of its inputs, which would be pickled, and notes of its origin."""
    program._example_inputs = None
    program._module_call_graph = [entry for entry in program.module_call_graph if not entry.fqn]
    for node in program.graph.nodes:
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def read(data: bytes, name: str) -> StoredProgram:
    """Read the .pt2 file of a program, of which `name` speaks in errors.

    Raises:
        ArtifactError: if it is none, or holds anything but calls of allowed operators on tensors and sizes.
    """
    try:
        return _Reader(_model_json(data)).program()
    except Exception as error:  # a damaged file fails anywhere
        raise ArtifactError(f"{name} holds no program that can be read ({type(error).__name__}: {error})") from error


def bind(program: StoredProgram, weights: Sequence[Weight]) -> GraphModule:
    """The graph of (input_ids, *state) that a program was made of, with the weights as its parameters and buffers.

    It holds all of the table, under their names and in their order, used or not.
    """
    module = GraphModule(nn.Module(), program.graph)
    for weight in weights:
        owner, _, leaf = weight.name.rpartition(".")
        place: nn.Module = module
        for child in owner.split(".") if owner else ():
            if child not in place._modules:
                place.add_module(child, nn.Module())
            place = place.get_submodule(child)
        if isinstance(weight.tensor, nn.Parameter):
            place.register_parameter(leaf, weight.tensor)
        else:
            place.register_buffer(leaf, weight.tensor)
    for node, weight in zip(module.graph.find_nodes(op="placeholder"), weights, strict=False):
        if node.users:
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(weight.name))
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return module


def weight_name(number: int) -> str:
    """The name of the input of a program that takes a weight."""
    return f"weight_{number}"


def _lift(graph: GraphModule, table: Mapping[tuple[object, ...], int], count: int) -> GraphModule:
    """A copy of a graph that takes the weights first: all of the table, so that every program takes the same."""
    lifted = Graph()
    weights = [lifted.placeholder(weight_name(number)) for number in range(count)]
    copies: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            copies[node] = weights[table[identity(_get_attr(graph, str(node.target)))]]
        else:
            copies[node] = lifted.node_copy(node, copies.__getitem__)
    return GraphModule(nn.Module(), lifted)


def _model_json(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        held: dict[str, bytes] = {}
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            held[entry.filename.partition("/")[2]] = archive.read(entry)
    if unknown := held.keys() - _MEMBERS.keys():
        raise ValueError(f"{', '.join(sorted(unknown))} is no part of a program without weights")
    for member, content in _MEMBERS.items():
        if isinstance(content, bytes) and held.get(member, b"") != content:
            raise ValueError(f"{member} is not empty")
        if isinstance(content, dict) and json.loads(held[member]) != content:
            raise ValueError(f"{member} is not {content}")
    model = json.loads(held["models/model.json"])
    if model["schema_version"]["major"] != _SCHEMA:
        raise ValueError(f"schema {model['schema_version']}, where {_SCHEMA} is known")
    return model  # type: ignore[no-any-return]


class _Reader:
    """Makes a graph of the nodes in torch's JSON, in which every value is an object of one kind and one content."""

    def __init__(self, model: dict[str, Any]) -> None:
        self.source = model["graph_module"]["graph"]
        self.graph = Graph()
        self.values: dict[str, Node] = {}

    def program(self) -> StoredProgram:
        inputs: dict[str, Input] = {}
        for argument in self.source["inputs"]:
            name = argument["as_tensor"]["name"]
            if name in inputs or not (name in INPUTS or re.fullmatch(r"weight_[0-9]+", name)):
                raise ValueError(f"an input named {name!r}")
            meta = self.source["tensor_values"][name]
            shape = tuple(size.get("as_int") for size in meta["sizes"])
            inputs[name] = Input(_SERIALIZE_TO_TORCH_DTYPE[meta["dtype"]], shape)
            self.values[name] = self.graph.placeholder(name)
        for node in self.source["nodes"]:
            self._call(node)
        (output,) = self.source["outputs"]
        self.graph.output((self.values[output["as_tensor"]["name"]],))
        self.graph.lint()
        return StoredProgram(self.graph, inputs)

    def _call(self, node: dict[str, Any]) -> None:
        arguments = [(entry["name"], entry["kind"], self._value(entry["arg"])) for entry in node["inputs"]]
        args = tuple(value for _, kind, value in arguments if kind == 1)
        kwargs = {name: value for name, kind, value in arguments if kind == 2}
        call = self.graph.call_function(_target(node["target"]), args, kwargs)
        outputs = node["outputs"]
        several = len(outputs) > 1
        if len(outputs) == 1 and outputs[0].keys() == {"as_tensors"}:
            outputs, several = [{"as_tensor": tensor} for tensor in outputs[0]["as_tensors"]], True
        for index, output in enumerate(outputs):
            ((kind, content),) = output.items()
            if kind == "as_none":
                continue
            name = content["name"] if kind == "as_tensor" else content["as_name"]
            self.values[name] = self.graph.call_function(operator.getitem, (call, index)) if several else call

    def _value(self, argument: dict[str, Any]) -> Any:
        ((kind, content),) = argument.items()
        match kind:
            case "as_none":
                return None
            case "as_tensor":
                return self.values[content["name"]]
            case "as_tensors":
                return [self.values[tensor["name"]] for tensor in content]
            case "as_optional_tensors":
                return [self._value(tensor) for tensor in content]
            case "as_name":
                return self.values[content]
            case "as_optional_tensor" | "as_sym_int" | "as_sym_float" | "as_sym_bool":
                return self._value(content)
            case "as_sym_ints" | "as_sym_floats" | "as_sym_bools":
                return [self._value(number) for number in content]
            case "as_int" | "as_bool" | "as_string" | "as_ints" | "as_bools" | "as_strings":
                return content
            case "as_float":
                return float(content)  # infinities are strings
            case "as_floats":
                return [float(number) for number in content]
            case "as_scalar_type":
                return _SERIALIZE_TO_TORCH_DTYPE[content]
            case "as_layout":
                return _SERIALIZE_TO_TORCH_LAYOUT[content]
            case "as_memory_format":
                return _SERIALIZE_TO_TORCH_MEMORY_FORMAT[content]
            case "as_device":
                return torch.device(content["type"], content["index"])
            case _:
                raise ValueError(f"an argument of the kind {kind!r}")


def _target(name: str) -> Callable[..., Any]:
    if name in _ON_SIZES:
        return _ON_SIZES[name]
    found = re.fullmatch(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", name, re.ASCII)
    if found is None:
        raise ValueError(f"{name!r} is no operator")
    space, packet, overload = found.groups()
    if space not in _LIBRARIES:
        raise ValueError(f"{name} is not allowed: a program may call the operators of {', '.join(_LIBRARIES)} alone")
    target = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
    if not isinstance(target, torch._ops.OpOverload):
        raise ValueError(f"there is no operator {name}: import what registers it first, if it is no part of torch")
    for argument in target._schema.arguments:
        if "str" in str(argument.type) and argument.name not in _SETTINGS:
            raise ValueError(f"{name} is not allowed: its argument {argument.name} could be the name of a file")
    return target
