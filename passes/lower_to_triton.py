"""Put the Triton kernels themselves into a decode step: for CUDA packages that are compiled ahead of time.

    ckv::cached_attention(...)  ->  ckv_triton::cached_attention(...)

An operator of the `ckv` library is a call back into Python. One of `ckv_triton` has the same schema and is made of
kernel launches that Inductor sees, so that a package holds their machine code.
"""

import torch
from torch.fx import GraphModule

from ckv_compile.graph import fault
from ckv_compile.ops import cached_attention, compact_, window_attention

_OPS = (cached_attention, window_attention, compact_)


def lower_to_triton(graph: GraphModule) -> int:
    """Replace the calls that change the state in a graph of one new token a row.

    Raises:
        PassError: for a graph of several tokens a row, whose prefill runs on the host.
    """
    import ckv_compile.kernels.embedded  # noqa: F401  (defines the operators; Triton is there where CUDA is)

    sites = [node for node in graph.graph.nodes if node.target in _OPS]
    for node in sites:
        steps = node.args[8] if node.target is compact_ else node.args[0].meta["val"].shape[2]
        if steps != 1:
            raise fault(node, "a step of one token a row", f"{steps} tokens")
        node.target = getattr(torch.ops.ckv_triton, node.target.overloadpacket.__name__).default
    return len(sites)
