"""Model -> graph: torch.export of a Hugging Face causal LM, and of the graphs that the passes made of it.

The only patches of this package live here; each is undone when the capture ends, however it ends.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from transformers import PreTrainedModel

from ckv_compile.cache import CacheState
from ckv_compile.errors import UnsupportedModelError

_EXAMPLE_BATCH, _EXAMPLE_STEPS = 2, 16


class _Logits(nn.Module):
    """The part of a causal LM that is traced: token ids and true positions in, logits out, no cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits


def capture(model: PreTrainedModel) -> GraphModule:
    """Trace a causal LM into a graph of (input_ids [B, S], position_ids [B, S]) -> (logits [B, S, vocab],).

    B and S are dynamic. The graph holds the model's own parameters, not copies; the model is left as it was.

    Raises:
        UnsupportedModelError: if torch.export cannot trace the model.
    """
    ids = torch.zeros(_EXAMPLE_BATCH, _EXAMPLE_STEPS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_EXAMPLE_STEPS, device=model.device).repeat(_EXAMPLE_BATCH, 1)
    both = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    wrapper = _Logits(model)
    wrapper.training = model.training  # not train(): that would reach into the model
    try:
        with _sdpa_attention(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            program = torch.export.export(
                wrapper, (ids, positions), dynamic_shapes={"input_ids": both, "position_ids": both}, strict=False
            )
    except Exception as error:
        raise UnsupportedModelError(
            f"torch.export could not trace {type(model).__name__} ({type(error).__name__}: {error}); "
            "ckv_compile takes decoder-only models whose forward is traceable with use_cache=False"
        ) from error
    return _to_module(program)


def reexport(graph: GraphModule, input_ids: Tensor, state: CacheState) -> GraphModule:
    """Trace a rewritten graph of (input_ids, *state) again at the shapes of its arguments, which become static."""
    with torch.no_grad():
        return _to_module(torch.export.export(graph, (input_ids, *state), strict=False))


def _to_module(program: ExportedProgram) -> GraphModule:
    """Unlift a program into a GraphModule with plain positional arguments and without export's metadata asserts."""
    module = program.module(check_guards=False)
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


_patching = threading.Lock()


@contextlib.contextmanager
def _sdpa_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model trace through scaled_dot_product_attention, whichever attention it was loaded with."""
    with _patching:  # another thread may be capturing the same model
        configs: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
        before = [(config, config._attn_implementation) for config in configs]
        try:
            for config in configs:
                config._attn_implementation = "sdpa"
            yield
        finally:
            for config, implementation in before:
                config._attn_implementation = implementation
