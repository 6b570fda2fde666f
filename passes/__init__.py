"""The graph passes, one file each. A pass changes a GraphModule in place and returns how many sites it rewrote."""

from ckv_compile.passes.canonicalize_attention import canonicalize_attention
from ckv_compile.passes.insert_cached_attention import insert_cached_attention
from ckv_compile.passes.insert_compaction import insert_compaction
from ckv_compile.passes.reduce_linear import reduce_linear
from ckv_compile.passes.slice_logits import slice_logits

__all__ = [
    "canonicalize_attention",
    "insert_cached_attention",
    "insert_compaction",
    "reduce_linear",
    "slice_logits",
]
