"""Model -> graph: torch.export of a causal LM, and of the graphs that the passes made of it.

A model that asks transformers' attention interface for its attention is traced with one that leaves a `ckv::attention`
node: q, k and v as they are, the mask, the scale, and what SDPA cannot say (score caps, learned sinks).

The only patches of this package live here; each is undone when the capture ends, however it ends.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph_module import _get_attr
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ckv_compile import ops
from ckv_compile.cache import CacheState
from ckv_compile.errors import CKVError, UnsupportedModelError

_INTERFACE = "ckv"
_EXAMPLE_BATCH, _EXAMPLE_STEPS = 2, 16


class Logits(nn.Module):
    """The part of a causal LM that is traced: token ids and true positions in, logits out, no cache.

    Args:
        model: the causal LM.
        compiled: whether to run a forward that torch.compile has compiled as such; torch.export never does.
    """

    def __init__(self, model: nn.Module, compiled: bool = True) -> None:
        super().__init__()
        self.model = model
        self.compiled = compiled

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        options = {"use_cache": False} if isinstance(self.model, PreTrainedModel) else {}
        model = self.model if self.compiled else getattr(self.model.forward, "_torchdynamo_orig_callable", self.model)
        output = model(input_ids=input_ids, position_ids=position_ids, **options)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits


def capture(model: nn.Module) -> GraphModule:
    """Trace a causal LM into a graph of (input_ids [B, S], position_ids [B, S]) -> (logits [B, S, vocab],).

    B and S are dynamic. The graph holds the model's own parameters, not copies; the model is left as it was. Where the
    model takes another path for long inputs, `meta["longest"]` is the longest one that the graph is true for.

    Args:
        model: a Hugging Face causal LM, or a module of forward(input_ids, position_ids) -> logits.

    Raises:
        UnsupportedModelError: if torch.export cannot trace the model.
    """
    device = device_of(model)
    ids = torch.zeros(_EXAMPLE_BATCH, _EXAMPLE_STEPS, dtype=torch.int64, device=device)
    positions = torch.arange(_EXAMPLE_STEPS, device=device).repeat(_EXAMPLE_BATCH, 1)
    both = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    wrapper = Logits(model)
    wrapper.training = model.training  # not train(): that would reach into the model
    try:
        with (
            _left_as_it_was(model),
            _attention_nodes(model),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            program = torch.export.export(
                wrapper, (ids, positions), dynamic_shapes={"input_ids": both, "position_ids": both}, strict=False
            )
    except CKVError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"torch.export could not trace {type(model).__name__}{_foreign_state(model)} ({type(error).__name__}: "
            f"{error}); ckv_compile takes decoder-only models whose forward(input_ids, position_ids) is traceable "
            "without a cache"
        ) from error
    shortest, longest = _traced_lengths(program)
    if shortest > 2:
        raise UnsupportedModelError(f"{type(model).__name__} takes another path for fewer than {shortest} tokens")
    graph = _to_module(program)
    graph.meta["longest"] = longest
    return graph


def device_of(model: nn.Module) -> torch.device:
    """The device of a model that lies on one."""
    return next(itertools.chain(model.parameters(), model.buffers())).device


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Undo what a forward sets on its modules: while it is traced, that is a tensor without numbers."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _traced_lengths(program: ExportedProgram) -> tuple[int, int | None]:
    """The sizes of the inputs that a trace holds for: a branch on a size is traced on one side only."""
    inputs = [node for node in program.graph.nodes if node.name in ("input_ids", "position_ids")]
    sizes = [size for node in inputs for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
    ranges = [
        program.range_constraints[size.node.expr] for size in sizes if size.node.expr in program.range_constraints
    ]
    ends = [int(each.upper) for each in ranges if each.upper < 2**31]
    return max((int(each.lower) for each in ranges), default=0), min(ends, default=None)


def reexport(graph: GraphModule, input_ids: Tensor, state: CacheState) -> GraphModule:
    """Trace a rewritten graph of (input_ids, *state) again at the shapes of its arguments, which become static."""
    with torch.no_grad():
        return _to_module(torch.export.export(graph, (input_ids, *state), strict=False))


def _to_module(program: ExportedProgram) -> GraphModule:
    """Unlift a program into a GraphModule with plain positional arguments and without export's metadata asserts."""
    module = program.module(check_guards=False)
    _unwrap_weights(module)
    graph = GraphModule(module, module.graph)  # a plain module: export's own refuses train() and eval()
    # Parameters of its own on the same storage: to cast or move the original gives that one new storage, and must not
    # change what a compiled program reads.
    shared: dict[Tensor, nn.Parameter] = {}
    for owner in graph.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in shared:
                shared[parameter] = nn.Parameter(parameter.detach(), requires_grad=False)
            setattr(owner, name, shared[parameter])
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.detach())
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    for node in list(graph.graph.nodes):
        # An assert keeps everything it looks at alive, the mask of a rewritten attention among it.
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _unwrap_weights(module: GraphModule) -> None:
    """Give the graph the plain tensors that it reads of a quantised weight, such as `qdata` and `scale`.

    Export has traced through the tensor subclass, which no node of the graph needs then.
    """
    inner_tensor = torch.ops.export.access_subclass_inner_tensor.default
    for node in module.graph.find_nodes(op="call_function", target=inner_tensor):
        weight, name = node.args
        owner, _, leaf = weight.target.rpartition(".")
        inner = getattr(_get_attr(module, weight.target), name)
        module.get_submodule(owner).register_parameter(f"{leaf}_{name}", nn.Parameter(inner, requires_grad=False))
        with module.graph.inserting_before(node):
            plain = module.graph.get_attr(f"{weight.target}_{name}")
        plain.meta = dict(node.meta)
        node.replace_all_uses_with(plain)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _foreign_state(model: nn.Module) -> str:
    """Say where a model mixes tokens by something with a state that is not a KV cache, as far as modules tell."""
    for path, module in model.named_modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            return f", where {path} ({type(module).__name__}) mixes tokens by a convolution and has no KV cache"
    return ""


def _attention_node(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention interface calls in place of an attention of its own.

    A sliding window comes as an argument too, which is ignored: the mask says it, and is proven. Any other tensor may
    choose what a token sees in place of the mask, as the indices of sparse attention do.
    """
    name = type(module).__name__
    if dropout > 0.0:
        raise UnsupportedModelError(f"{name} has attention dropout with p={dropout}: call model.eval() first")
    if position_bias is not None:
        raise UnsupportedModelError(f"{name} adds a position bias to its scores, which no cache of centroids can hold")
    for argument, given in others.items():
        if isinstance(given, Tensor) and argument != "position_ids":
            raise UnsupportedModelError(f"{name} gives its attention `{argument}`, beside a mask: sparse attention?")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and not causal:
        raise UnsupportedModelError(f"{name} is not causal: every token sees the later ones")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.to(query.dtype)  # some are kept in float32
    out = ops.attention(query, key, value, attention_mask, sinks, scale, softcap or 0.0)
    return out.transpose(1, 2).contiguous(), None


_patching = threading.Lock()


@contextlib.contextmanager
def _attention_nodes(model: nn.Module) -> Iterator[None]:
    """Let a model trace through the interface above, or SDPA if it is older than that; whichever it was loaded with."""
    with _patching:  # another thread may be capturing the same model
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        before = [(module.config, module.config._attn_implementation) for module in models]
        AttentionInterface.register(_INTERFACE, _attention_node)
        AttentionMaskInterface.register(_INTERFACE, sdpa_mask)
        try:
            for module in models:
                modern = module._supports_attention_backend
                module.config._attn_implementation = _INTERFACE if modern else "sdpa"
            yield
        finally:
            for config, implementation in before:
                config._attn_implementation = implementation
            del AttentionInterface._global_mapping[_INTERFACE]
            del AttentionMaskInterface._global_mapping[_INTERFACE]
