"""Speed and memory.

`contest` runs ours beside what a user would pick instead, each in a process of its own, which is `worker` or an adapter
of `peers`; `contestants` says who they are, `timing` how a run is timed. `tables` looks closer at ours, in one process.
"""

from ckv_compile.benchmark.timing import cache_bytes

__all__ = ["cache_bytes"]
