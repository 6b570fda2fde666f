"""The graph passes, one file each: a pass changes a GraphModule in place and returns how many sites it rewrote."""
