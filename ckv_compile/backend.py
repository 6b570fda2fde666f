"""The torch.compile backend "ckv": an original model, in transformers' own loop, over a clustered cache.

    cache = ckv_compile.cache_for(model, budget=1024)
    model.forward = torch.compile(model.forward, backend="ckv")
    model.generate(**inputs, past_key_values=cache)

The model calls `ClusteredCache.update` in every layer, which Dynamo traces as `ckv::update`. The graph goes through the
passes of `transform`: its attention becomes one over the state of the cache, which is among the graph's inputs. A graph
of one new token a row is compiled by Inductor; one of several runs as it is.

Dynamo hands over one graph for each shape, so a mask is not proven here for all lengths, as in `transform`: `cache_for`
has proven the masks of the model, and here those of the graph are compared with them at its length, and those that come
as inputs at every call.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckv_compile.cache import CacheState, ClusteredCache, Group
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, InputError, UnsupportedModelError
from ckv_compile.graph import (
    ATTENTION_TARGETS,
    Attention,
    ancestors,
    attention_arguments,
    evaluate,
    fault,
    inputs,
    state_inputs,
    tensor_meta,
)
from ckv_compile.inputs import check_positions, check_range, left_padding
from ckv_compile.model import allocate_cache, check_batch_size, rewrite_model
from ckv_compile.ops import attention, cached_attention, update, window_attention
from ckv_compile.passes.canonicalize_attention import canonicalize_attention, ungrouped, window_of
from ckv_compile.passes.insert_cached_attention import insert_cached_attention
from ckv_compile.passes.insert_compaction import insert_compaction
from ckv_compile.passes.reduce_linear import reduce_linear
from ckv_compile.pipeline import Pass, run_passes
from ckv_compile.schedule import GroupPlan, Plans, Schedule

_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "eager")
_STATE_ARGUMENTS = slice(2, 2 + len(CacheState._fields))  # of ckv::update


def cache_for(
    model: nn.Module, config: CKVConfig | None = None, *, batch_size: int = 1, **options: Any
) -> ClusteredCache:
    """Make a cache that an original model can be given, once its forward is compiled by the backend "ckv".

    The model is captured and rewritten as in `transform`, to find what the cache must hold and to prove that it can
    stand for the model's own; it is not changed.

    Such a cache is for the model that it was made for: one of another model of the same sizes is not always told apart.
    It can be forked, cropped and reset, but not saved.

    Args:
        model: as in `transform`; its attention must call scaled_dot_product_attention, and `update` of its cache.
        config: the configuration; or pass its fields as options, `budget` at least.
        batch_size: rows of the cache.
        **options: fields of `CKVConfig`.

    Raises:
        ConfigError: for a bad or unknown option.
        InputError: for a batch size outside 1..max_batch_size.
        UnsupportedModelError: for a model that cannot be captured or rewritten, with the reason.
    """
    check_batch_size(batch_size)
    name = type(model).__name__
    if any(is_traceable_wrapper_subclass(weight) for weight in model.parameters()):
        raise UnsupportedModelError(
            f'{name} has quantised weights, which the backend "ckv" cannot trace: use transform(), or quantise less'
        )
    rewritten, config = rewrite_model(model, config, options)
    if config.prefill_chunk is not None:
        raise ConfigError(
            f"prefill_chunk={config.prefill_chunk} is of transform(): with this cache, pass "
            f"prefill_chunk_size={config.prefill_chunk} to the model's own generate()"
        )
    if {result.name: result.matches for result in rewritten.passes}["freeze_rotary"]:
        raise UnsupportedModelError(
            f"{name} changes its rotary frequencies with the length of its input: use transform(), which chooses them "
            "once"
        )
    state = state_inputs(rewritten.graph)
    kinds: dict[Node, Group] = {state.keys: "main", state.light_keys: "light", state.window_keys: "window"}
    layers = [node for node in rewritten.graph.graph.nodes if node.target in (cached_attention, window_attention)]
    groups = tuple(kinds[node.args[3]] for node in layers)
    return allocate_cache(rewritten.shape, config, batch_size, groups=groups, positions=rewritten.positions)


def backend(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo traced of a forward which was given a `ClusteredCache`.

    Args:
        graph: with the state of the cache among its inputs.
        example_inputs: not used: the graph says their shapes.
        options: fields of `CKVConfig`; they must be those of the cache.
        mode: None or "default" compile the step of one token a row; "reduce-overhead" also records it as a CUDA graph;
            "max-autotune" has Inductor choose its kernels by trial; "eager" compiles nothing.

    Raises:
        ConfigError: for an unknown mode or option, or one that is not the cache's.
        UnsupportedModelError: for a graph without the cache, with a part of it, or that a pass refuses (`PassError`).
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r}: choose one of {', '.join(map(repr, _MODES))}")
    _check_tokens(graph)
    aten = _to_aten(graph)
    updates = aten.graph.find_nodes(op="call_function", target=update)
    if not updates:
        _refuse_without_cache(aten)
    plans = _name_inputs(aten, graph, updates)
    _check_layers(aten, updates)
    _check_positions_of_rows(aten)
    steps = tensor_meta(updates[0].args[0]).shape[2]
    masks: dict[Node, int] = {}
    prove = functools.partial(_prove_at_this_length, proven=set(), masks=masks)
    results = run_passes(aten, [functools.partial(canonicalize_attention, layers=len(updates), prove=prove)])
    groups = _check_order(aten)
    light_layers = [number for number, group in enumerate(groups) if group == "light"]
    int8 = tensor_meta(state_inputs(aten).keys).dtype == torch.int8
    _check_options(options or {}, plans, light_layers, len(groups) - groups.count("window"), int8)
    if steps != 1:
        placeholders = aten.graph.find_nodes(op="placeholder")
        with aten.graph.inserting_after(placeholders[-1]):
            aten.graph.placeholder("padding").meta["val"] = tensor_meta(state_inputs(aten).position)
    passes: list[Pass] = [
        functools.partial(insert_cached_attention, plans=plans, light_layers=light_layers),
        functools.partial(insert_compaction, plans=plans),
    ]
    on_cpu = tensor_meta(state_inputs(aten).keys).device.type == "cpu"
    if steps == 1 and on_cpu and mode != "eager":
        passes.append(reduce_linear)
    run_passes(aten, passes, before=results)
    names = list(inputs(aten))
    call = _Call(
        program=_compile(aten, mode) if steps == 1 and mode != "eager" else aten.forward,
        steps=_size_at_run_time(aten, steps),
        position=names.index("position"),
        position_ids=names.index("position_ids") if "position_ids" in names else None,
        input_ids=names.index("input_ids") if "input_ids" in names else None,
        masks=tuple((names.index(str(node.target)), window) for node, window in masks.items()),
        vocabulary=_vocabulary(aten),
    )
    return call.run


class _Call(NamedTuple):
    """What Dynamo calls: the checks of `CKVForCausalLM.forward`, then the program."""

    program: Callable[..., Any]
    steps: int | tuple[int, int]  # tokens a row, or the input and dimension that say it
    position: int  # index of an input
    position_ids: int | None
    input_ids: int | None
    masks: tuple[tuple[int, int], ...]  # inputs, and the window that each must show
    vocabulary: int | None

    def run(self, *given: Any) -> Any:
        """Advance the cache whose state is among the inputs, and return what the forward computes.

        Raises:
            InputError: for positions, masks or token ids that do not fit; the cache is then as it was.
        """
        cache = ClusteredCache.of(given[self.position])
        steps = self.steps if isinstance(self.steps, int) else given[self.steps[0]].shape[self.steps[1]]
        cache.check_whole()
        seen, extra = cache.state.position, []
        if steps > 1 or not seen.is_cuda:  # a step on CUDA does not wait for the device
            if self.input_ids is not None and self.vocabulary is not None:
                check_range(given[self.input_ids], self.vocabulary)
            padding = None if self.position_ids is None else cache.padding(given[self.position_ids])
            padding = torch.zeros_like(seen) if padding is None else padding
            for index, window in self.masks:
                _check_mask(given[index], steps, window, padding, cache)
            extra = [padding] if steps > 1 else []
        # Columns first, which the host knows; there are no more tokens than that.
        if cache.positions is not None and cache.columns + steps > cache.positions:
            check_positions(int((seen + steps - sum(extra)).max()), cache.positions)
        cache.broken = True
        with torch.no_grad():
            output = self.program(*given, *extra)
        cache.columns += steps
        cache.broken = False
        return output


def _to_aten(graph: GraphModule) -> GraphModule:
    """Trace Dynamo's graph of torch functions and methods into one of aten operators, the form that export gives."""
    fakes = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    for node, fake in zip(graph.graph.find_nodes(op="placeholder"), fakes, strict=True):
        # With dynamic=True the float attributes of modules are inputs too; here they are numbers, with a guard each.
        if isinstance(number := getattr(fake, "item_memo", None), torch.SymFloat):
            for user in list(node.users):
                user.replace_all_uses_with(float(number))
                graph.graph.erase_node(user)
    with torch.no_grad(), preserve_node_meta():
        aten = make_fx(torch.fx.Interpreter(graph).run, tracing_mode="symbolic", pre_dispatch=True)(*fakes)
    aten.meta |= graph.meta
    for node, traced in zip(
        graph.graph.find_nodes(op="placeholder"), aten.graph.find_nodes(op="placeholder"), strict=True
    ):
        traced.meta["tensor_dict"] = node.meta.get("tensor_dict")  # tells Inductor which inputs stay where they are
    return aten


def _name_inputs(aten: GraphModule, graph: GraphModule, updates: list[Node]) -> Plans:
    """Give the inputs that the passes look at their names, and return the plans of the cache."""
    for node, traced in zip(
        graph.graph.find_nodes(op="placeholder"), aten.graph.find_nodes(op="placeholder"), strict=True
    ):
        source = node.meta["grapharg"].source.name
        source = source() if callable(source) else source
        for name in ("input_ids", "position_ids"):
            if source.endswith(f"['{name}']"):
                traced.target = name
    for name, node in zip(CacheState._fields, updates[0].args[_STATE_ARGUMENTS], strict=True):
        assert isinstance(node, Node)
        node.target = name
    if len({node.args[_STATE_ARGUMENTS] for node in updates}) > 1:
        raise UnsupportedModelError("this forward updates more than one ClusteredCache: compile each model by itself")
    aten.recompile()
    state, schedules = state_inputs(aten), {}
    for node in updates:
        plan: Any = node.args[_STATE_ARGUMENTS.stop + 2 :]
        schedules["light" if node.args[_STATE_ARGUMENTS.stop + 1] == "light" else "main"] = Schedule(*plan)
    any_schedule = next(iter(schedules.values()))  # of a group without layers, where none is used
    return Plans(
        *(
            GroupPlan(schedules.get(group, any_schedule), int(tensor_meta(keys).shape[3]))
            for group, keys in (("main", state.keys), ("light", state.light_keys))
        )
    )


def _check_options(
    options: Mapping[str, Any], plans: Plans, light_layers: Sequence[int], layers: int, int8: bool
) -> None:
    """Refuse options that are not those of a cache of `layers` clustered layers."""
    main = plans.main
    own = dataclasses.asdict(main.schedule) | {"interval": main.capacity - main.schedule.budget}
    own |= {"cache_dtype": "int8" if int8 else "auto"}
    del own["n_exact"]
    config = CKVConfig.from_options(own | dict(options))
    if light_layers:
        del own["budget"]  # of the main group; the option is the mean over both
    sizes = {"budget", "exact", "light_layers", "light_share"}
    if others := options.keys() - own.keys() - sizes:
        raise ConfigError(f"options {', '.join(sorted(others))} are not of the backend: pass them to cache_for()")
    for name, value in own.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"options={{{name!r}: {getattr(config, name)!r}}} of the backend, but the cache was made with "
                f"{name}={value!r}: pass the options to cache_for() alone, or the same to both"
            )
    given = {name: options[name] for name in options if name in sizes}
    if isinstance(config.budget, float):
        raise ConfigError(f"options={given} of the backend: give the budget as a number of slots, as the cache has it")
    if light_layers and given and not {"budget", "light_layers"} <= given.keys():
        raise ConfigError(
            f"options={given} of the backend, for a cache with light layers {list(light_layers)}: give budget and "
            "light_layers together, or none of them"
        )
    alike = list(config.light_layers) == list(light_layers) and config.plans(layers) == plans
    if given and not alike:
        raise ConfigError(
            f"options={given} of the backend do not make the cache that it got, of {main.schedule.n_exact} exact slots "
            f"in {main.schedule.budget} and light layers {list(light_layers)}: pass the options to cache_for() alone, "
            "or the same to both"
        )


def _refuse_without_cache(aten: GraphModule) -> None:
    if any(node.target in ATTENTION_TARGETS for node in aten.graph.nodes):
        raise UnsupportedModelError(
            'the backend "ckv" got a graph whose attention has no ClusteredCache: make one by '
            "ckv_compile.cache_for(model, budget=...), and pass it to the model as its cache (past_key_values=)"
        )
    raise UnsupportedModelError(
        'the backend "ckv" got a graph without attention and without a ClusteredCache: compile the forward of the '
        "whole model, and where that has graph breaks (fullgraph=True shows the first), remove them"
    )


def _check_layers(aten: GraphModule, updates: list[Node]) -> None:
    """Refuse a graph that has not every layer of the cache exactly once."""
    state = state_inputs(aten)
    slots = {"main": state.keys, "light": state.light_keys, "window": state.window_keys}
    expected = [(layer, group) for group, keys in slots.items() for layer in range(int(tensor_meta(keys).shape[1]))]
    found = [node.args[_STATE_ARGUMENTS.stop : _STATE_ARGUMENTS.stop + 2] for node in updates]
    if sorted(map(tuple, found), key=str) != sorted(expected, key=str):
        raise UnsupportedModelError(
            f'the backend "ckv" got a graph that updates {len(set(found))} of the cache\'s {len(expected)} layers: the '
            "forward has a graph break between them (fullgraph=True shows it), or the cache is another model's"
        )
    attention = sum(node.target in ATTENTION_TARGETS for node in aten.graph.nodes)
    if attention < len(updates):
        raise UnsupportedModelError(
            f'the backend "ckv" found {attention} calls of scaled_dot_product_attention for {len(updates)} layers: '
            'load the model with attn_implementation="sdpa", or where it has none (score caps, learned sinks) use '
            "transform()"
        )


def _check_tokens(graph: GraphModule) -> None:
    """Refuse tokens that do not fit in the cache, in Dynamo's graph; the number of rows is no symbol from here on."""
    for node in graph.graph.nodes:
        if node.target in (torch.ops.ckv.update, update):
            k, last = (argument.meta["example_value"] for argument in (node.args[0], node.args[6]))  # last_queries
            if (int(k.shape[0]), k.dtype, k.device) != (last.shape[0], last.dtype, last.device):
                raise InputError(
                    f"new tokens of {k.shape[0]} rows, {k.dtype} on {k.device}, for a cache of {last.shape[0]} rows, "
                    f"{last.dtype} on {last.device}: make a cache of as many rows, by cache_for() of this very model"
                )


def _check_positions_of_rows(aten: GraphModule) -> None:
    """Refuse to count the positions of several rows from the cache's length, which is that of the longest one."""
    position = state_inputs(aten).position
    counted = any(user.target is not update for user in position.users)
    if counted and "position_ids" not in inputs(aten) and tensor_meta(position).shape[0] > 1:
        raise InputError(
            "a batch needs position_ids, as generate() passes them: without, all rows would get those of the longest"
        )


def _check_order(aten: GraphModule) -> list[Group]:
    """Refuse attentions that do not come in the order of the cache's layers, each with keys and values of its own.

    Returns:
        The groups of all attentions, in order.
    """
    groups: list[Group] = []
    numbers: dict[Group, int] = {"main": 0, "light": 0, "window": 0}
    for node in aten.graph.find_nodes(op="call_function", target=attention):
        given = attention_arguments(node)
        found = (_layer_of(given.k), _layer_of(given.v))
        due = [(number, group) for group, number in numbers.items() if (group == "window") == (given.window > 0)]
        if found[0] != found[1] or found[0] not in due:
            raise fault(node, f"keys and values of the next layer of its kind, one of {due}", f"those of {found}")
        numbers[found[0][1]] += 1
        groups.append(found[0][1])
    return groups


def _layer_of(tensor: Node) -> tuple[int, Group] | None:
    """Layer and group of the `ckv::update` that gave an attention its keys or values."""
    tensor = ungrouped(tensor)
    while tensor.target is torch.ops.aten.constant_pad_nd.default:  # to the head size of keys or values
        tensor = tensor.all_input_nodes[0]
    source = tensor.all_input_nodes[0] if tensor.target is operator.getitem else tensor
    if source.target is not update:
        return None
    layer: Any = source.args[_STATE_ARGUMENTS.stop : _STATE_ARGUMENTS.stop + 2]
    return tuple(layer)


def _prove_at_this_length(
    graph: GraphModule, node: Node, given: Attention, proven: set[tuple[Node, int]], masks: dict[Node, int]
) -> int:
    """Return the window of the layer that an attention belongs to, if its mask shows it at the length of the graph.

    A mask that depends on inputs is proven to be what they say; which they are goes to `masks`, with the window.
    """
    layer = _layer_of(given.k)
    if layer is None:
        raise fault(node, "keys that ClusteredCache.update() returned", f"{given.k.name}")
    window = int(tensor_meta(state_inputs(graph).window_keys).shape[3]) if layer[1] == "window" else 0
    queries, keys = (_hint(tensor_meta(tensor).shape[2]) for tensor in (given.q, given.k))
    if queries != keys:
        raise fault(node, "as many keys as queries", f"{keys} keys for {queries} queries")
    mask = given.mask
    if mask is None:
        if not given.is_causal and queries > 1:
            raise fault(node, "causal attention", "attention without a mask: every token sees the later ones")
        return window
    if (mask, window) not in proven:
        feed, found_in = {}, ancestors(mask)
        for source in graph.graph.find_nodes(op="placeholder"):
            if source in found_in:
                feed[source] = _stand_in(source, queries, window)
        found = window_of(evaluate(graph, mask, feed), queries)
        if found != (window if window < queries else 0):
            raise fault(
                node,
                f"a window of {window} tokens" if window else "a causal mask",
                f"another mask, at the length of {queries} tokens",
            )
        named = (*CacheState._fields, "position_ids", "input_ids")
        for source in feed:
            if str(source.target) not in named and isinstance(source.meta["val"], Tensor):
                masks[source] = window
        proven.add((mask, window))
    return window


def _stand_in(source: Node, steps: int, window: int) -> Any:
    """What an input of a mask is at the first tokens of a row without padding."""
    like = source.meta["val"]
    if not isinstance(like, Tensor):
        return _hint(like)
    shape = tuple(_hint(size) for size in like.shape)
    if str(source.target) == "position_ids":
        return torch.arange(steps).expand(shape)
    if len(shape) == 4:  # a mask as it is
        seen = _seen(steps, window).expand(shape)
        return seen if like.dtype == torch.bool else torch.zeros(shape, dtype=like.dtype).masked_fill(~seen, -1e9)
    return torch.full(shape, str(source.target) not in CacheState._fields, dtype=like.dtype)


def _hint(size: Any) -> int:
    """The number that a symbolic size has in the call that is being traced."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _seen(steps: int, window: int, device: torch.device | None = None) -> Tensor:
    """Which of as many tokens each sees [S, S]: the last `window`, or all up to itself."""
    seen = torch.ones(steps, steps, dtype=torch.bool, device=device).tril()
    return seen.triu(1 - window) if window else seen


def _check_mask(mask: Tensor, steps: int, window: int, padding: Tensor, cache: ClusteredCache) -> None:
    """Refuse a mask that hides more or less than the padding [B] and what is not in the window."""
    if mask.ndim == 2:
        fits = left_padding(mask, cache, mask[:, -steps:]) == padding.tolist()
    else:
        shown = torch.arange(steps, device=mask.device) >= padding[:, None]  # [B, S]
        expected = _seen(steps, window, mask.device) & shown[:, None, None, :]
        found = mask if mask.dtype == torch.bool else mask == 0
        hidden = ~mask if mask.dtype == torch.bool else mask <= -1e4  # a mask of other numbers is neither
        fits = mask.shape[-2:] == (steps, steps) and bool(
            ((found == expected) & (hidden == ~expected) | ~shown[:, None, :, None]).all()  # padding may see anything
        )
    if not fits:
        raise InputError(
            f"an attention_mask of {tuple(mask.shape)} that hides other tokens than the padding at the left of each "
            f"row, {padding.tolist()} of {steps} columns as position_ids tell: pad on the left, and pass position_ids "
            "that start with 0 behind the padding, as generate() does"
        )


def _size_at_run_time(graph: GraphModule, size: Any) -> int | tuple[int, int]:
    """A static size, or the input and dimension where a symbolic one is found."""
    if isinstance(size, int):
        return size
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        shape: Sequence[Any] = getattr(node.meta["val"], "shape", ())
        for dim, found in enumerate(shape):
            if isinstance(found, torch.SymInt) and found.node.expr == size.node.expr:
                return index, dim
    raise UnsupportedModelError("the number of new tokens cannot be read from the size of an input")


def _vocabulary(graph: GraphModule) -> int | None:
    """Rows of the table that token ids are looked up in."""
    input_ids = inputs(graph).get("input_ids")
    for node in input_ids.users if input_ids is not None else ():
        if node.target is torch.ops.aten.embedding.default:
            return int(tensor_meta(node.all_input_nodes[0]).shape[0])
    return None


def _compile(graph: GraphModule, mode: str | None) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx  # takes a second to import

    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        patches = dict(torch._inductor.list_mode_options(mode))
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    compiled: Any = compile_fx(graph, fakes, config_patches=patches)
    return compiled  # type: ignore[no-any-return]
