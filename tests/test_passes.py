"""Each pass: graphs that match, graphs that must not, the count, the numerics."""

import functools
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ckv_compile.passes.canonicalize_attention import canonicalize_attention
from ckv_compile.passes.insert_cached_attention import cache_shape, insert_cached_attention
from ckv_compile.passes.insert_compaction import insert_compaction
from ckv_compile.passes.reduce_linear import reduce_linear
from ckv_compile.passes.slice_logits import slice_logits
from conftest import tiny_model
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from ckv_compile.cache import CacheShape, CacheState
from ckv_compile.capture import capture, reexport
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, PassError
from ckv_compile.graph import attention_arguments, table_limits
from ckv_compile.ops import attention, cached_attention, compact_, window_attention
from ckv_compile.pipeline import run_passes

KINDS = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
PLANS = CKVConfig(budget=64, interval=8, n_recent=8).plans(layers=2)
aten = torch.ops.aten


def count(graph: GraphModule, target: object) -> int:
    return sum(node.target is target for node in graph.graph.nodes)


class OneLayer(nn.Module):
    """A decoder of one attention whose mask, dropout and head are the test's to choose."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, **call: object) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.call = heads, kv_heads, call
        self.embed = nn.Embedding(32, heads * 8)
        self.key_value = nn.Linear(heads * 8, 2 * kv_heads * 8)
        self.head = nn.Linear(heads * 8, 32)

    def mask(self, input_ids: Tensor, position_ids: Tensor) -> Tensor | None:
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.call)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        batch, steps, width = hidden.shape
        k, v = self.key_value(hidden).view(batch, steps, 2 * self.kv_heads, 8).transpose(1, 2).chunk(2, dim=1)
        q = hidden.view(batch, steps, self.heads, 8).transpose(1, 2)
        out = self.attend(q, k, v, self.mask(input_ids, position_ids))
        return self.head(out.transpose(1, 2).reshape(batch, steps, width))


def trace(module: nn.Module) -> GraphModule:
    ids, positions = torch.zeros(2, 16, dtype=torch.int64), torch.arange(16).repeat(2, 1)
    both = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    program = torch.export.export(module, (ids, positions), dynamic_shapes=(both, both), strict=False)
    graph = program.module(check_guards=False)
    graph = GraphModule(graph, graph.graph)
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    graph.recompile()
    return graph


def run_canonical(graph: GraphModule, layers: int = 1) -> None:
    run_passes(graph, [functools.partial(canonicalize_attention, layers=layers)])


# ------------------------------------------------------------------------------------------ canonicalize_attention


@pytest.mark.parametrize("family", ["llama", "llama-mha-bias", "qwen3"])
def test_canonical_attention_has_no_mask_and_grouped_heads_and_the_same_logits(family, prompt):
    model = tiny_model(family)
    graph = capture(model)
    assert canonicalize_attention(graph, layers=3) == 3
    graph.recompile()
    assert count(graph, attention) == 3
    for node in graph.graph.nodes:
        if node.target is attention:
            assert node.args[3:] == (None, None, (48 // 6 if family != "qwen3" else 16) ** -0.5, 0.0, 0)
            assert node.args[1].meta["val"].shape[1] == model.config.num_key_value_heads
    ids = prompt(40, batch=3)
    expected = model(ids).logits
    torch.testing.assert_close(graph(ids, torch.arange(40).repeat(3, 1))[0], expected, atol=1e-5, rtol=1e-5)


class BufferMask(OneLayer):
    def __init__(self) -> None:
        super().__init__(enable_gqa=True)
        self.register_buffer("causal", torch.ones(600, 600, dtype=torch.bool).tril())

    def mask(self, input_ids, position_ids):
        return self.causal[: input_ids.shape[1], : input_ids.shape[1]]


class AdditiveMask(OneLayer):
    def mask(self, input_ids, position_ids):
        hidden = position_ids[0][None, :] > position_ids[0][:, None]
        return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)


class RepeatInterleave(OneLayer):
    def attend(self, q, k, v, mask):
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)


@pytest.mark.parametrize(
    "module",
    [OneLayer(is_causal=True, enable_gqa=True), BufferMask(), AdditiveMask(enable_gqa=True), RepeatInterleave()],
    ids=["is_causal", "buffer-mask", "additive-mask", "repeat_interleave"],
)
def test_causal_masks_of_other_makes_are_proven_and_removed(module):
    graph = trace(module)
    ids, positions = torch.arange(20)[None] % 32, torch.arange(20)[None]
    expected = graph(ids, positions)[0]
    run_canonical(graph)
    (site,) = (node for node in graph.graph.nodes if node.target is attention)
    assert site.args[1].meta["val"].shape[1] == 2
    assert attention_arguments(site).window == 0
    torch.testing.assert_close(graph(ids, positions)[0], expected)


@pytest.mark.parametrize(("keys", "values"), [(8, 3), (3, 8)])
def test_keys_and_values_of_different_sizes_get_zeros(keys, values):
    class TwoSizes(OneLayer):
        def attend(self, q, k, v, mask):
            out = super().attend(q[..., :keys], k[..., :keys], v[..., :values], mask)
            return F.pad(out, (0, 8 - values))

    graph = trace(TwoSizes(is_causal=True, enable_gqa=True))
    ids, positions = torch.arange(20)[None] % 32, torch.arange(20)[None]
    expected = graph(ids, positions)[0]
    run_canonical(graph)
    assert cache_shape(graph).head_dim == 8
    torch.testing.assert_close(graph(ids, positions)[0], expected)


def test_a_layer_may_attend_more_than_once():
    class Twice(OneLayer):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, mask) - super().attend(k.repeat(1, 2, 1, 1), k, v, mask)

    graph = trace(Twice(is_causal=True, enable_gqa=True))
    assert canonicalize_attention(graph, layers=1) == 2
    assert cache_shape(graph).layers == 2


class Window(OneLayer):
    def mask(self, input_ids, position_ids):
        near = position_ids[0][:, None] - position_ids[0][None, :]
        return (near >= 0) & (near < 40)


class Bidirectional(OneLayer):
    def mask(self, input_ids, position_ids):
        return torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)


class HidesToken(OneLayer):
    def mask(self, input_ids, position_ids):
        return (position_ids[0][:, None] >= position_ids[0][None, :]) & (input_ids[:, None, None, :] != 3)


class Handwritten(OneLayer):
    def attend(self, q, k, v, mask):
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        return (q @ k.mT).softmax(dim=-1) @ v


class Dropout(OneLayer):
    def attend(self, q, k, v, mask):
        return F.dropout(super().attend(q, k, v, mask), 0.3, training=self.training)


class WindowInBuffer(BufferMask):
    """A window that no number in the graph gives away, as GPT-Neo registers it."""

    def __init__(self) -> None:
        super().__init__()
        self.causal &= ~torch.ones(600, 600, dtype=torch.bool).tril(-100)


class WindowInTensor(OneLayer):
    def __init__(self) -> None:
        super().__init__(enable_gqa=True)
        self.register_buffer("window", torch.tensor(50))

    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance < self.window)


class WindowInFloat(OneLayer):
    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance * (1 / 50.0) < 1)


class LargeWindow(OneLayer):
    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance < 32768)


class LargeWindowInFloat(OneLayer):
    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance * (1 / 8192.0) < 1)


class LargeWindowInTensor(OneLayer):
    def __init__(self) -> None:
        super().__init__(enable_gqa=True)
        self.register_buffer("window", torch.tensor(5000))

    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance < self.window)


class TwoWindows(OneLayer):
    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance <= 2000) & (distance < 4096) & (distance < 90)


class Blocks(OneLayer):
    size = 40

    def mask(self, input_ids, position_ids):
        query, key = position_ids[0][:, None], position_ids[0][None, :]
        return (query >= key) & (query // self.size == key // self.size)


class LargeBlocks(Blocks):
    size = 4096


class Strided(OneLayer):
    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & ((distance < 64) | (distance % 64 == 0))


class WindowOfBlocks(OneLayer):
    def mask(self, input_ids, position_ids):
        query, key = position_ids[0][:, None], position_ids[0][None, :]
        return (query >= key) & (query // 64 - key // 64 < 8)


class ShiftedBlocks(OneLayer):
    def mask(self, input_ids, position_ids):
        query, key = position_ids[0][:, None], position_ids[0][None, :]
        return (query >= key) & (query >> 9 == key >> 9)


class Gap(OneLayer):
    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & ((distance < 20) | (distance > 700))


class ScaledWindow(OneLayer):
    """Of 600 tokens, which no number says."""

    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance * 0.5 < 300)


class ScaledLargeWindow(OneLayer):
    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return (distance >= 0) & (distance * 0.5 < 3000)


class Distance(OneLayer):
    """ALiBi."""

    def mask(self, input_ids, position_ids):
        distance = position_ids[0][:, None] - position_ids[0][None, :]
        return torch.where(distance >= 0, distance * -0.5, float("-inf"))


@pytest.mark.parametrize(
    ("module", "window"),
    [
        (Window(enable_gqa=True), 40),
        (WindowInBuffer(), 100),
        (WindowInTensor(), 50),
        (WindowInFloat(enable_gqa=True), 50),
        (LargeWindow(enable_gqa=True), 32768),
        (LargeWindowInFloat(enable_gqa=True), 8192),
        (TwoWindows(enable_gqa=True), 90),
        (ScaledWindow(enable_gqa=True), 600),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_sliding_window_is_found_in_the_mask_and_proven(module, window):
    graph = trace(module)
    ids, positions = torch.arange(120)[None] % 32, torch.arange(120)[None]
    expected = graph(ids, positions)[0]
    run_canonical(graph)
    (site,) = (node for node in graph.graph.nodes if node.target is attention)
    assert attention_arguments(site).window == window
    torch.testing.assert_close(graph(ids, positions)[0], expected)


def test_a_window_as_long_as_the_context_counts_as_none():
    for context, window in ((32768, 0), (32769, 32768), (None, 32768)):
        graph = trace(LargeWindow(enable_gqa=True))
        canonicalize_attention(graph, context=context)
        (site,) = (node for node in graph.graph.nodes if node.target is attention)
        assert attention_arguments(site).window == window


class Prefix(OneLayer):
    def __init__(self) -> None:
        super().__init__(is_causal=True, enable_gqa=True)
        self.prefix = nn.Parameter(torch.randn(1, 2, 4, 8))

    def attend(self, q, k, v, mask):
        k, v = (torch.cat([self.prefix.expand(q.shape[0], -1, -1, -1), tensor], dim=2) for tensor in (k, v))
        return super().attend(q, k, v, mask)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Prefix(), "a learned prefix"),
        (Bidirectional(enable_gqa=True), "a mask that is neither at a length of 2 tokens"),
        (Blocks(enable_gqa=True), "a mask in steps or blocks, by aten.floor_divide"),
        (LargeBlocks(enable_gqa=True), "a mask in steps or blocks"),
        (Strided(enable_gqa=True), "a mask in steps or blocks, by aten.remainder"),
        (WindowOfBlocks(enable_gqa=True), "a mask in steps or blocks"),
        (ShiftedBlocks(enable_gqa=True), "a mask in steps or blocks, by aten.__rshift__"),
        (LargeWindowInTensor(), "the constant window of shape () with 5000 in it"),
        (Gap(enable_gqa=True), "a mask that is neither at a length of 702 tokens"),
        (ScaledLargeWindow(enable_gqa=True), "a mask that changes with its number 3000"),
        (Distance(enable_gqa=True), "a bias that depends on distance (ALiBi)"),
        (HidesToken(enable_gqa=True), "depends on the token ids"),
        (OneLayer(enable_gqa=True), "attention without a mask"),
        (OneLayer(is_causal=True, enable_gqa=True, dropout_p=0.1), "attention dropout with p=0.1"),
        (Dropout(is_causal=True, enable_gqa=True), "dropout with p=0.3"),
        (Handwritten(), "an attention that does not call SDPA"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_attention_that_is_neither_causal_nor_windowed_is_refused(module, found):
    with pytest.raises(PassError) as caught:
        run_canonical(trace(module.train()))
    message = str(caught.value)
    assert found in message
    assert caught.value.failed_pass == "canonicalize_attention"
    assert f"node {caught.value.node} of module" in message
    assert "expected" in message


def test_a_layer_without_attention_is_named_with_what_it_holds():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = nn.Linear(32, 32)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.state(hidden).cumsum(dim=1)

    class Hybrid(OneLayer):
        def __init__(self) -> None:
            super().__init__(is_causal=True, enable_gqa=True)
            self.layers = nn.ModuleList([Recurrent()])

        def attend(self, q, k, v, mask):
            return super().attend(q + self.layers[0](q.transpose(1, 2).flatten(2)).sum(), k, v, mask)

    with pytest.raises(
        PassError, match=r"module layers\.0: expected 2 .*found 1, none of them in this layer of Linear"
    ):
        canonicalize_attention(trace(Hybrid()), layers=2)


def test_site_count_that_does_not_fit_names_both_counts():
    with pytest.raises(PassError, match="expected 5 scaled_dot_product_attention nodes, one a layer, found 3"):
        canonicalize_attention(capture(tiny_model()), layers=5)


# ----------------------------------------------------------------------------------------- insert_cached_attention


def rewritten_graph() -> tuple[GraphModule, CacheShape]:
    graph = capture(tiny_model())
    canonicalize_attention(graph, layers=3)
    shape = cache_shape(graph)
    insert_cached_attention(graph, PLANS)
    graph.recompile()
    return graph, shape


def test_cached_attention_takes_the_state_and_its_layer_index():
    graph, _ = rewritten_graph()
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    assert names == ["input_ids", *CacheState._fields]
    assert [node.args[11] for node in graph.graph.nodes if node.target is cached_attention] == [0, 1, 2]
    assert count(graph, attention) == 0


def test_positions_come_from_the_state(prompt):
    model = tiny_model()
    graph, shape = rewritten_graph()
    state = CacheState.allocate(shape, 72, 1)
    ids = prompt(20)
    torch.testing.assert_close(graph(ids, *state)[0], model(ids).logits, atol=1e-5, rtol=1e-5)
    # The same tokens behind ten others that the cache does not hold: RoPE is relative, so nothing changes.
    moved = CacheState.allocate(shape, 72, 1)
    moved.position.fill_(10)
    torch.testing.assert_close(graph(ids, *moved)[0], model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (2, 2)], ids=["KV heads", "query heads"])
def test_layers_of_different_shapes_are_refused(heads, kv_heads):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = OneLayer(4, 2, is_causal=True, enable_gqa=True)
            self.two = OneLayer(heads, kv_heads, is_causal=True, enable_gqa=True)

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.one(input_ids, position_ids) + self.two(input_ids, position_ids)

    graph = trace(Two())
    canonicalize_attention(graph, layers=2)
    expected = "module two: expected 4 query and 2 KV heads of size 8 and a window of 0"
    with pytest.raises(PassError, match=rf"{expected}, .* found {heads}, {kv_heads}, \d+ and 0"):
        cache_shape(graph)


def test_layers_with_and_without_a_window_are_two_groups_of_the_cache():
    graph = capture(tiny_model("gemma3", head_dim=16, sliding_window=20))
    canonicalize_attention(graph, layers=3)
    shape = cache_shape(graph)
    assert shape[:4] == (1, 3, 2, 16)
    assert shape[6:] == (20, 2, 3, 16, (), False)
    insert_cached_attention(graph, PLANS)
    targets = [node.target for node in graph.graph.nodes if node.target in (cached_attention, window_attention)]
    assert targets == [window_attention, cached_attention, window_attention]
    assert [node.args[7] for node in graph.graph.nodes if node.target is window_attention] == [0, 1]


def test_two_sizes_of_windows_are_refused():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Window(enable_gqa=True), WindowInFloat(enable_gqa=True)

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.one(input_ids, position_ids) + self.two(input_ids, position_ids)

    graph = trace(Two())
    canonicalize_attention(graph)
    with pytest.raises(PassError, match=r"module two: expected .* a window of 40, .* found 4, 2, 8 and 50"):
        cache_shape(graph)


def test_the_ends_of_tables_are_found():
    class Learned(OneLayer):
        def __init__(self) -> None:
            super().__init__(is_causal=True, enable_gqa=True)
            self.positions = nn.Embedding(52, 32)

        def attend(self, q, k, v, mask):
            return super().attend(q + self.positions(self.where + 2)[:, None, :, :8], k, v, mask)

        def forward(self, input_ids, position_ids):
            self.where = position_ids
            return super().forward(input_ids, position_ids)

    class Placeholders(OneLayer):  # as of images
        def forward(self, input_ids, position_ids):
            ids = input_ids.clone()
            ids[input_ids == 40] = 0
            return super().forward(ids, position_ids)

    assert table_limits(trace(Learned())) == (32, 50)
    assert table_limits(trace(Placeholders(is_causal=True, enable_gqa=True))) == (32, None)
    assert table_limits(capture(tiny_model())) == (128, None)


# ------------------------------------------------------------------------------------ slice_logits, insert_compaction


def test_slice_logits_computes_the_last_token_only(prompt):
    model = tiny_model()
    graph = capture(model)
    assert slice_logits(graph) == 1
    graph.recompile()
    ids = prompt(30, batch=2)
    logits = graph(ids, torch.arange(30).repeat(2, 1))[0]
    assert logits.shape == (2, 1, 128)
    torch.testing.assert_close(logits, model(ids).logits[:, -1:], atol=1e-5, rtol=1e-5)


def test_slice_logits_refuses_an_output_that_is_no_linear_head():
    class Normed(OneLayer):
        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, position_ids).softmax(dim=-1)

    with pytest.raises(PassError, match="logits made by a linear head"):
        slice_logits(trace(Normed(is_causal=True, enable_gqa=True)))


def test_attention_that_is_not_canonical_gets_no_cache():
    graph = capture(tiny_model())
    with pytest.raises(PassError, match="expected the canonical form of canonicalize_attention"):
        insert_cached_attention(graph, PLANS)
    with pytest.raises(PassError, match="ckv::attention nodes, found none"):
        insert_cached_attention(trace(Handwritten()), PLANS)


def test_light_layers_are_a_group_of_their_own():
    graph = capture(tiny_model("gemma3", head_dim=16, sliding_window=20, num_hidden_layers=4, layer_types=KINDS))
    canonicalize_attention(graph, layers=4)
    shape, plans = cache_shape(graph, (2,)), CKVConfig(budget=400, light_layers=(2,), light_share=0.3).plans(3)
    assert (shape.layers, shape.light_layers, shape.window_layers) == (2, (2,), 1)
    insert_cached_attention(graph, plans, (2,))
    calls = [node for node in graph.graph.nodes if node.target in (cached_attention, window_attention)]
    assert [node.args[3].name for node in calls] == ["keys", "window_keys", "light_keys", "keys"]
    assert [node.kwargs.get("budget") for node in calls] == [540, None, 120, 540]
    assert [node.args[11 if node.target is cached_attention else 7] for node in calls] == [0, 0, 0, 1]
    assert insert_compaction(graph, plans) == 2
    light, main = (node for node in graph.graph.nodes if node.target is compact_)
    assert [node.args[0].name for node in (light, main)] == ["light_keys", "keys"]
    assert (light.args[7], main.args[7].name) == (None, "position")  # counted once


@pytest.mark.parametrize(
    ("layer", "message"), [(4, r"4 is no layer of this model, whose layers are 0 to 3"), (1, "has a sliding window")]
)
def test_layers_that_cannot_be_light_are_refused(layer, message):
    graph = capture(tiny_model("gemma3", head_dim=16, sliding_window=20, num_hidden_layers=4, layer_types=KINDS))
    canonicalize_attention(graph, layers=4)
    with pytest.raises(ConfigError, match=message):
        cache_shape(graph, (layer,))


def test_compaction_without_a_cache_is_refused():
    with pytest.raises(PassError, match=r"attention nodes with a cache before it, found none"):
        insert_compaction(capture(tiny_model()), PLANS)


def test_compaction_closes_the_step():
    graph, _ = rewritten_graph()
    assert insert_compaction(graph, PLANS) == 1
    *_, last, output = graph.graph.nodes
    assert last.target is compact_
    assert output.op == "output"
    assert [node.name for node in last.args[:8]] == list(CacheState._fields[:8])


# ---------------------------------------------------------------------------------------------------- reduce_linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_of_one_row_becomes_a_reduction(bias, dtype):
    linear = nn.Linear(48, 30, bias=bias, dtype=dtype)
    x = torch.randn(1, 1, 48, dtype=dtype)
    exported = torch.export.export(linear, (x,), strict=False).module(check_guards=False)
    graph = GraphModule(exported, exported.graph)
    assert reduce_linear(graph) == 1
    graph.recompile()
    assert count(graph, aten.linear.default) == 0
    exact = linear.double()(x.double())
    # One rounding of a float32 sum: half a unit in the last place of the dtype.
    torch.testing.assert_close(graph(x).double(), exact, atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)


def test_linear_of_several_rows_is_left_alone():
    linear = nn.Linear(48, 30)
    exported = torch.export.export(linear, (torch.randn(2, 1, 48),), strict=False).module(check_guards=False)
    graph = GraphModule(exported, exported.graph)
    assert reduce_linear(graph) == 0
    assert count(graph, aten.linear.default) == 1


# ---------------------------------------------------------------------------------------------------- the pass manager


def test_an_error_names_the_passes_already_run():
    def harmless(graph: GraphModule) -> int:
        return 0

    graph = trace(OneLayer(enable_gqa=True))
    with pytest.raises(PassError, match=r"pass canonicalize_attention .*passes already run: harmless"):
        run_passes(graph, [harmless, functools.partial(canonicalize_attention, layers=1)])


def test_each_pass_logs_one_line_and_dumps_its_graph(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("CKV_DUMP", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="ckv_compile"):
        results = run_passes(capture(tiny_model()), [slice_logits])
    assert [(result.name, result.matches) for result in results] == [("slice_logits", 1)]
    assert [record.message.split(",")[0] for record in caplog.records] == ["slice_logits: 1 sites"]
    before, after = ((tmp_path / f"0_slice_logits.{when}.txt").read_text() for when in ("before", "after"))
    assert "linear" in before
    assert before != after


def test_the_decode_graph_is_static_and_holds_one_op_a_layer():
    graph, shape = rewritten_graph()
    slice_logits(graph)
    insert_compaction(graph, PLANS)
    graph.recompile()
    decode = reexport(graph, torch.zeros(2, 1, dtype=torch.int64), CacheState.allocate(shape, 72, 2))
    assert count(decode, cached_attention) == 3
    assert count(decode, compact_) == 1
    assert count(decode, aten.sym_size.int) == 0
    for node in decode.graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            assert all(isinstance(size, int) for size in value.shape), node
