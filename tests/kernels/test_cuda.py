"""The kernels on an NVIDIA GPU: every case, every function at real sizes, the layer, and the same bits on every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu import backend, layer, mla_stack
from dsacp_npu._geometry import with_tensors
from dsacp_npu._triton_launch import has_hopper
from dsacp_npu.compressor import CompressorWeights
from dsacp_npu.fp8 import FP8Vectors, dequantized_fp8, quantized_fp8
from dsacp_npu.layer import LayerCache
from dsacp_npu.step import step_metadata
from tests.cann.test_layer import KINDS, LEGAL, by_cut, float64_step, legal_world
from tests.compare import assert_same, assert_same_selection, assert_within_budget, scoring_noise
from tests.kernels import harness, latents_cases
from tests.kernels import test_mla_layer as v32
from tests.kernels.attention_cases import attending
from tests.kernels.test_layer import on_kernels
from tests.layer_strategies import Cut, Kind
from tests.maths_strategies import compressor_of
from tests.mirror.common import compare_floats, mapped, to_numpy, to_torch
from tests.mirror.test_devices import no_waiting
from tests.module import test_cann as on_operators
from tests.module.worlds import layers_of

RUNS = 20  # of each call that is looked at for races
ATTENTION_HEADS = (8, 16, 32, 64, 128)
TOKENS, ENTRIES, WINDOW, PAGE = 512, 4096, 128, 64
CASES = {**harness.cases(), **harness.gpu_cases()}


@pytest.mark.parametrize("name", list(CASES))
def test_case(name: str) -> None:
    case = CASES[name]()
    there = {name: on_cuda(value) for name, value in case.arguments.items()}
    case.kernel[(case.programs,)](**there, **case.constexprs, num_stages=1)
    for name, value in case.arguments.items():
        if isinstance(value, torch.Tensor):
            value.copy_(there[name])
    case.check()


def on_cuda(value: Any) -> Any:
    """Tensors of this nest on the device."""
    return mapped(value, lambda tensor: tensor.cuda() if isinstance(tensor, torch.Tensor) else tensor)


def on_cpu(value: Any) -> Any:
    """Tensors of this nest on the host."""
    return mapped(value, lambda tensor: tensor.cpu() if isinstance(tensor, torch.Tensor) else tensor)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Random bfloat16 of this shape on the device."""
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def table_of(rows: int, seed: int) -> torch.Tensor:
    """The block table of one request whose blocks lie in random order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randperm(-(-rows // PAGE), generator=generator, device="cuda").int()[None]


def step_of(ratio: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Offsets, extent and length of the last queries of a prompt."""
    length = ENTRIES * max(ratio, 1) // (32 if ratio == 128 else 1) + TOKENS
    return torch.tensor([0, TOKENS]).int().cuda(), torch.tensor([length]).int().cuda(), length


def same_bits(call: Callable[[], Any]) -> Any:
    """The result of a call, which is the same on every run."""
    first = call()
    for _ in range(RUNS):
        again = call()
        for one, other in zip(flat(first), flat(again), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return first


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a nest."""
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in flat(part)]


@pytest.mark.parametrize("bound", [None, 40.0], ids=["running maximum", "fixed reference"])
@pytest.mark.parametrize("num_heads", ATTENTION_HEADS)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_attention_at_real_sizes(ratio: int, num_heads: int, bound: float | None) -> None:
    """Every 37th query against torch in float64, torch's own bfloat16 beside it."""
    cu_seqlens_q, seqused_kv, length = step_of(ratio)
    swa_table, cmp_table = table_of(length, 1), table_of(max(1, length // max(ratio, 2)), 2)
    q, swa = normal(3, TOKENS, num_heads, 512), normal(4, swa_table.shape[1], PAGE, 512)
    cmp = normal(5, cmp_table.shape[1], PAGE, 512)
    sink = torch.randn(num_heads, generator=torch.Generator("cuda").manual_seed(6), device="cuda")
    lengths, sizes = (cu_seqlens_q, seqused_kv, sink), {"window_size": WINDOW, "softmax_scale": 512**-0.5}
    some = torch.arange(0, TOKENS, 37)
    caches: tuple[Any, ...] = (swa, swa_table)
    function, chosen = "window_attention", ()
    if ratio > 1:
        caches, sizes["compress_ratio"], function = (*caches, cmp, cmp_table), ratio, "all_entries_attention"
    if ratio == 4:
        noise = torch.rand(TOKENS, ENTRIES, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
        function, chosen = "selected_attention", (noise.topk(512).indices.int(),)
    ours, theirs = (getattr(backend.get(name), function) for name in ("triton", "torch"))
    got = same_bits(lambda: ours(q, *caches, *chosen, *lengths, **sizes, logit_bound=bound))
    # Each of the queries as an operator row of its own, for the reference on the host.
    rows = torch.arange(len(some) + 1).int(), (seqused_kv.cpu() - TOKENS + 1 + some).int(), sink.cpu()
    tables = [table.expand(len(some), -1).cpu() for table in caches[1::2]]
    plain = [part for pair in zip((cache.cpu() for cache in caches[::2]), tables, strict=True) for part in pair]
    exact = [part.double() if part.is_floating_point() else part for part in plain]
    picked = [part[some.cuda()].cpu() for part in chosen]
    want = theirs(q[some.cuda()].cpu().double(), *exact, *picked, *rows[:2], rows[2].double(), **sizes)
    beside = theirs(q[some.cuda()].cpu(), *plain, *picked, *rows, **sizes)
    for mine, due, low, name in zip(got, want, beside, ("out", "lse"), strict=True):
        assert_within_budget(mine[some.cuda()].cpu().to(low.dtype), due, low, name)


@pytest.mark.skipif(not has_hopper(0), reason="this is no Hopper GPU, or Triton is older than 3.6")
@pytest.mark.parametrize("bound", [None, 70.0], ids=["running maximum", "fixed reference"])
@pytest.mark.parametrize("num_heads", [17, 128])
@pytest.mark.parametrize("form", ["window", "selected", "all_entries"])
def test_the_hopper_kernel_on_the_same_lists(form: str, num_heads: int, bound: float | None) -> None:
    """The portable kernel's cases: queries without keys, gaps, NaN where nobody may look."""
    from dsacp_npu.kernels.hopper.attention import attention_hopper_kernel

    case = attending(form, num_heads, bound=bound, head_dim=512, family="cuda")
    there = on_cuda(dict(case.arguments))
    there["num_tasks"] = len(there["q_ptr"]) * -(-num_heads // 64)
    sizes = {name: case.constexprs[name] for name in ("H", "D", "WINDOW", "WIDTH", "ENTRIES", "FIXED", "WIDE")}
    attention_hopper_kernel[(2,)](**there, **sizes, BH=64, BK=64, num_warps=4)
    for name, value in case.arguments.items():
        if isinstance(value, torch.Tensor):
            value.copy_(there[name])
    case.check()


@pytest.mark.skipif(not has_hopper(0), reason="this is no Hopper GPU, or Triton is older than 3.6")
@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("num_heads", [40, 128])
def test_the_hopper_kernel_over_latents(num_heads: int, wide: bool) -> None:
    """The portable kernel's cases: lists of nothing, gaps, NaN in what nobody chose."""
    from dsacp_npu.kernels.hopper.latents import latents_hopper_kernel

    case = latents_cases.attending(num_heads, rank=512, rope=64, family="cuda", wide=wide)
    there = on_cuda(dict(case.arguments))
    there["num_tasks"] = len(there["q_ptr"]) * -(-num_heads // 64)
    sizes = {name: case.constexprs[name] for name in ("H", "D", "ROPE", "WIDE")}
    latents_hopper_kernel[(2,)](**there, **sizes, BH=64, BK=64, num_warps=4)
    for name, value in case.arguments.items():
        if isinstance(value, torch.Tensor):
            value.copy_(there[name])
    case.check()


@pytest.mark.parametrize("num_heads", ATTENTION_HEADS)
def test_attention_over_latents_at_real_sizes(num_heads: int) -> None:
    """V3.2's: 2048 tokens a query, some of them none. Every 37th query as in attention."""
    cu_seqlens_q, seqused_kv, length = step_of(1)
    table, softmax_scale = table_of(length, 1), 576**-0.5
    parts = [normal(3, TOKENS, num_heads, 512), normal(4, TOKENS, num_heads, 64)]
    parts += [normal(5, table.shape[1], PAGE, 512), normal(6, table.shape[1], PAGE, 64)]
    noise = torch.rand(TOKENS, ENTRIES, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    chosen = noise.topk(2048).indices.int()
    chosen[:, ::5] = -1
    chosen[37] = -1
    ours, theirs = (backend.get(name).latent_attention for name in ("triton", "torch"))
    got = same_bits(lambda: ours(*parts, table, chosen, cu_seqlens_q, seqused_kv, softmax_scale=softmax_scale))
    some = torch.arange(0, TOKENS, 37)
    plain = [part.cpu() for part in (*(part[some.cuda()] for part in parts[:2]), *parts[2:])]
    lists = table.expand(len(some), -1).cpu(), chosen[some.cuda()].cpu()
    rows = torch.arange(len(some) + 1).int(), (seqused_kv.cpu() - TOKENS + 1 + some).int()
    want = theirs(*(part.double() for part in plain), *lists, *rows, softmax_scale=softmax_scale)
    beside = theirs(*plain, *lists, *rows, softmax_scale=softmax_scale)
    for mine, due, low, name in zip(got, want, beside, ("out", "lse"), strict=True):
        assert_within_budget(mine[some.cuda()].cpu(), due, low, name)


@pytest.mark.parametrize("num_heads", [1, 64])
def test_rope_at_real_sizes(num_heads: int) -> None:
    x = normal(1, 4096, num_heads, 512)
    angles = torch.rand(4096, 32, device="cuda") * 6
    args = x, angles.cos(), angles.sin()
    for name in ("apply_rope", "apply_inverse_rope", "apply_half_rope"):
        got = same_bits(lambda name=name: getattr(backend.get("triton"), name)(*args))
        assert_within_budget(
            got.cpu(),
            getattr(backend.get("torch"), name)(*(part.cpu().double() for part in args)),
            getattr(backend.get("torch"), name)(*(part.cpu() for part in args)),
            name,
        )


@pytest.mark.parametrize(("ratio", "index_topk"), [(4, 512), (1, 2048)])
def test_the_indexer_at_real_sizes(ratio: int, index_topk: int) -> None:
    """The choice is the stable order's of the kernel's own scores; those are within the budget of plain float32."""
    ops = backend.get("triton")
    cu_seqlens_q, seqused_kv, length = step_of(ratio)
    table = table_of(length // ratio, 1)
    q, weights, cache = normal(2, TOKENS, 64, 128), normal(3, TOKENS, 64), normal(4, table.shape[1], PAGE, 128)
    keys = cache[table[0].long()].flatten(0, 1)[: length // ratio]
    scores = same_bits(lambda: ops.index_scores(q, weights, keys))
    reference = backend.get("torch").index_scores
    exact = reference(q.cpu()[:64].double(), weights.cpu()[:64].double(), keys.cpu().double())
    assert_within_budget(scores[:64].cpu(), exact, reference(q.cpu()[:64], weights.cpu()[:64], keys.cpu()))
    sizes = {"compress_ratio": ratio, "index_topk": index_topk}
    got = same_bits(lambda: ops.lightning_indexer(q, weights, cache, table, cu_seqlens_q, seqused_kv, **sizes))
    visible = (length - TOKENS + 1 + torch.arange(TOKENS, device="cuda")) // ratio
    hidden = torch.arange(len(keys), device="cuda") >= visible[:, None]
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :index_topk]
    assert torch.equal(got.long(), order)


LENS = torch.tensor([3, 0, 1, 40, 7, 1], dtype=torch.int32)
LOC = torch.cat([LENS.new_zeros(1), LENS.cumsum(0, dtype=torch.int32)])
SEQ_LENS = LENS + torch.tensor([5, 9, 0, 100, 0, 63], dtype=torch.int32)
PADDED = {"num_input_tokens": 56}  # of the rules that cut the flat stream
BY_REQUEST = ("contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded")
SPLITS = {"contiguous": PADDED, "round_robin": PADDED, **{name: {} for name in BY_REQUEST}}
SLOTS = torch.tensor([5, -1, 17, 0, 30, -1], dtype=torch.int32)
EXACT: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *(("local_extents", (LOC, SEQ_LENS, 4, 1), {"split": name, **padded}) for name, padded in SPLITS.items()),
    ("build_cp_local_metadata", (LOC, SEQ_LENS, 4, 3, None, None), {"num_input_tokens": 56}),
    ("query_rows", (LOC,), {"num_rows": 60}),
    ("query_positions", (LOC, SEQ_LENS), {"num_rows": 60}),
    ("slot_mapping", (SLOTS, SLOTS.clamp(0, 1), torch.arange(8, dtype=torch.int32).view(2, 4), 16), {}),
    ("gathered_rows", (torch.randn(4, 8, 96).bfloat16(), SLOTS), {}),
    ("scattered_rows", (torch.randn(4, 8, 96).bfloat16(), torch.randn(6, 96).bfloat16(), SLOTS), {}),
    ("scattered_rows_", (torch.zeros(4, 8, 96, dtype=torch.int8), torch.ones(6, 96, dtype=torch.int8), SLOTS), {}),
]


@pytest.mark.parametrize("call", EXACT, ids=lambda call: f"{call[0]} {call[2].get('split', '')}".strip())
def test_integers_and_copies(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    """To the bit what torch gives, and nothing waits for the device."""
    name, args, words = call
    there = on_cuda(args)
    want = getattr(backend.get("torch"), name)(*args, **words)
    with no_waiting():
        got = getattr(backend.get("triton"), name)(*there, **words)
    assert_same(on_cpu(got), want, name)


def test_heads_go_out_and_come_back() -> None:
    ops, x = backend.get("triton"), normal(1, 100, 16, 512)
    packed = same_bits(lambda: ops.packed_heads(x, 4))
    assert torch.equal(packed, torch.stack(x.chunk(4, dim=1)))
    assert torch.equal(ops.unpacked_heads(packed), x)


def int8_call() -> tuple[Any, ...]:
    """Coded queries, weights and keys for `int8_index_scores`."""
    ops = backend.get("torch")
    coded = [ops.quantized_int8(torch.randn(shape)) for shape in ((9, 64, 128), (300, 128))]
    return coded[0], torch.randn(9, 64).half(), coded[1]


FLOATS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("hadamard", (torch.randn(70, 64, 128).bfloat16(),), {}),
    ("hadamard", (torch.randn(70, 128),), {}),
    ("rms_norm", (torch.randn(70, 64, 512).bfloat16(), None, 1e-6), {}),
    ("rms_norm", (torch.randn(70, 7168).bfloat16(), torch.randn(7168), 1e-6), {}),
]


@pytest.mark.parametrize("call", FLOATS, ids=lambda call: f"{call[0]} {list(call[1][0].shape)}")
def test_rows_by_themselves(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, words = call
    got = same_bits(lambda: getattr(backend.get("triton"), name)(*on_cuda(args), **words))
    wide = mapped(args, lambda tensor: tensor.double())
    torch_function = getattr(backend.get("torch"), name)
    assert_within_budget(got.cpu(), torch_function(*wide, **words), torch_function(*args, **words), name)


def test_int8_scores() -> None:
    args = int8_call()
    got = same_bits(lambda: backend.get("triton").int8_index_scores(*on_cuda(args)))
    plain = backend.get("torch").int8_index_scores(*args)
    codes, weights, keys = (part.double() if isinstance(part, torch.Tensor) else part for part in args)
    hits = torch.einsum("thd,nd->thn", codes.values.double(), keys.values.double()).relu()
    exact = (hits * (codes.scales.double() * weights)[..., None]).sum(1) * keys.scales.double()
    assert_within_budget(got.cpu(), exact, plain, "int8_index_scores")


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("name", ["compress", "compress_"])
def test_the_compressor(name: str, ratio: int) -> None:
    """Two steps, so that the second pools from the ring; entries and state against float64."""
    rng = np.random.default_rng(ratio)
    made = compressor_of(rng, ratio, ratio == 4, hidden=64, d=512, pairs=32, dtype=np.float32)
    weights = CompressorWeights(*(torch.tensor(part) for part in made.weights))
    states = {kind: backend.get("torch").empty_state(weights, 2) for kind in ("cuda", "plain")}
    states["exact"] = mapped(states["plain"], lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    before = torch.zeros(2, dtype=torch.int32)
    for counts in ((150, 7), (130, 1)):
        loc = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        x = torch.tensor(rng.standard_normal((sum(counts), 64)), dtype=torch.float32)
        rest = {"eps": made.eps}
        wide = mapped(weights, lambda tensor: tensor.double())
        got = getattr(backend.get("triton"), name)(
            *on_cuda((x, weights, loc, before, states["cuda"])), made.freqs, **rest
        )
        plain = backend.get("torch").compress(x, weights, loc, before, states["plain"], made.freqs, **rest)
        exact = backend.get("torch").compress(x.double(), wide, loc, before, states["exact"], made.freqs, **rest)
        compare_floats(on_cpu(got), to_numpy(exact, "float64"), plain, name)
        states = {"cuda": got.state, "plain": plain.state, "exact": exact.state}
        before = before + torch.tensor(counts, dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"ratio {kind.ratio}")
def test_a_layer_over_ranks(kind: Kind) -> None:
    """Projections gathered from two ranks, then pooled; heads sent to their tokens."""
    world = legal_world(kind.ratio, [138, 7], kind)
    weights, cache = on_cuda(to_torch(world.weights, "bfloat16")), on_kernels(world.cache)
    x, batch = world.step([0, 0], [138, 7])
    x, batch = to_torch(x, "bfloat16"), to_torch(batch)
    cut = Cut(2, "zigzag", "scattered", "gather_kv", "all_to_all")
    alone = layer.attention_layer(
        x.cuda(),
        weights,
        on_cuda(cache),
        on_cuda(batch),
        LEGAL,
        compress_ratio=kind.ratio,
        backend=backend.get("triton"),
    )
    topk = alone.topk_indices if kind.indexer else None
    host = on_cpu((x, weights, cache, batch))
    chosen = None if topk is None else topk.cpu()
    plain = layer.attention_layer(*host, LEGAL, compress_ratio=kind.ratio, given_topk=chosen)
    exact = float64_step(*host, kind, chosen)
    for rows, output in by_cut(cut, kind, backend.get("triton"))(x.cuda(), weights, on_cuda(cache), batch, topk):
        real = torch.from_numpy(rows >= 0)
        assert_within_budget(output.cpu()[real], exact[rows[real]], plain.output[rows[real]], "over ranks")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"ratio {kind.ratio}")
def test_a_layer_of_chunks(kind: Kind) -> None:
    """Three steps of the layer, and nothing in them waits for the device."""
    world = legal_world(kind.ratio, [138, 7], kind)
    weights, cache = on_cuda(to_torch(world.weights, "bfloat16")), on_cuda(on_kernels(world.cache))
    done = [0, 0]
    for new in ([130, 4], [7, 2], [1, 1]):
        ends = [a + b for a, b in zip(done, new, strict=True)]
        x, batch = world.step(done, ends, idle=(1,))
        x, batch = on_cuda(to_torch(x, "bfloat16")), on_cuda(to_torch(batch))
        with no_waiting():
            alone = layer.attention_layer(
                x, weights, cache, batch, LEGAL, compress_ratio=kind.ratio, backend=backend.get("triton")
            )
        host = on_cpu((x, weights, cache, batch))
        topk = alone.topk_indices.cpu() if kind.indexer else None
        plain = layer.attention_layer(*host, LEGAL, compress_ratio=kind.ratio, given_topk=topk)
        exact = float64_step(*host, kind, topk)
        assert_within_budget(alone.output.cpu(), exact, plain.output, "one device")
        cache, done = LayerCache(*alone.cache), ends
    assert np.isfinite(exact).all()


def model_on(device: str, seed: int, name: str = "triton") -> tuple[Any, list[Any], Any]:
    """A model of three layers, its modules on a backend, and caches, on a device."""
    model = on_operators.model_of(seed)
    layers = layers_of(model, dtype="bfloat16", backend=backend.get(name), device=device)
    sizes = {"num_tokens": 160, "max_requests": 3, "block_size": 16, "cmp_block_size": 16, "device": device}
    return model, layers, on_operators.Caches(on_operators.CONFIG, range(3), **sizes)


def rows_of(model: Any, caches: Any, new_tokens: dict[str, int], device: str) -> torch.Tensor:
    """The rows of a step's tokens."""
    done = {name: caches.num_computed_tokens(name) for name in new_tokens}
    rows = [model.x[name][done[name] : done[name] + count] for name, count in new_tokens.items()]
    return torch.tensor(np.concatenate(rows)).bfloat16().to(device)


def test_a_captured_graph_replays_over_steps() -> None:
    """The module's decode steps, captured once: lists of slots are filled in with the rest of a step's metadata."""
    model, layers, caches = model_on("cuda", 5)
    _, plain_layers, plain_caches = model_on("cpu", 5, "torch")
    sizes = {"num_slots": 3, "num_input_tokens": 3, "decode_query_len": 1}
    for new_tokens in ({"a": 130}, {"b": 4}):
        for name in new_tokens:
            caches.open(name)
            plain_caches.open(name)
        for some, held, device in ((layers, caches, "cuda"), (plain_layers, plain_caches, "cpu")):
            step, x = step_metadata(some, held, new_tokens), rows_of(model, held, new_tokens, device)
            for layer_ in some:
                layer_(x, step, held[layer_.layer_idx])
    static = step_metadata(layers, caches, {}, **sizes)
    x = torch.zeros(3, model.config.hidden_size, dtype=torch.bfloat16, device="cuda")

    def forward() -> list[torch.Tensor]:
        return [layer_(x, static, caches[layer_.layer_idx].tensors) for layer_ in layers]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward()  # idle slots: it writes nothing, and compiles what must not be compiled while capturing
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()
    for new_tokens in ({"a": 1, "b": 1}, {"b": 1}, {"b": 1, "a": 1}):
        rows = rows_of(model, caches, new_tokens, "cuda")
        static.fill_(step_metadata(layers, caches, new_tokens, **sizes))
        x.zero_()
        x[: len(rows)] = rows
        graph.replay()
        caches.advance(static.batches[1])
        step = step_metadata(plain_layers, plain_caches, new_tokens)
        for layer_, got in zip(plain_layers, outputs, strict=True):
            want = layer_(rows.cpu(), step, plain_caches[layer_.layer_idx]).float()
            error = (got[: len(rows)].cpu().float() - want).norm() / want.norm()
            assert error < 1e-2, (new_tokens, layer_.layer_idx, error)


def test_the_indexer_reads_fp8_keys() -> None:
    """A choice by codes, but where scores are nearer than bfloat16 tells apart: tensor cores add float8 in 14 bits."""
    _, seqused_kv, length = step_of(1)
    table = table_of(length, 1)
    q, weights, keys = normal(2, 64, 64, 128), normal(3, 64, 64), normal(4, table.shape[1], PAGE, 128)
    cache, sizes = quantized_fp8(keys), {"compress_ratio": 1, "index_topk": 2048}
    rows = torch.tensor([0, 64], dtype=torch.int32, device="cuda"), seqused_kv
    call = backend.get("triton").lightning_indexer
    got = same_bits(lambda: call(q, weights, cache, table, *rows, **sizes)).cpu()
    plain = FP8Vectors(cache.values.cpu(), cache.scales.cpu())
    lists = table.cpu(), *(part.cpu() for part in rows)
    due = backend.get("torch").lightning_indexer(q.cpu(), weights.cpu(), plain, *lists, **sizes)
    decoded = dequantized_fp8(quantized_fp8(q.cpu()))
    in_order = dequantized_fp8(plain)[table.cpu()[0].long()].flatten(0, 1)[:length]
    score = backend.get("torch").index_scores
    exact = score(decoded.double(), weights.cpu().double(), in_order.double()).numpy()
    short = score(decoded.bfloat16(), weights.cpu(), in_order.bfloat16()).bfloat16()
    assert_same_selection(got, due, exact, scoring_noise(exact, short))


@pytest.mark.parametrize("split", ["zigzag", "round_robin"])
def test_a_v32_stack_over_ranks(split: str) -> None:
    """All ranks of a stack on one GPU, rows scattered, experts shared: what one device of the mirror gives."""
    weights, ids, step, caches = v32.small_stack()
    whole = mla_stack.mla_decoder_stack(ids, weights, caches, step, v32.CONFIG)
    on_gpu = with_tensors((weights, [caches] * 2), lambda tensor: tensor.cuda())
    options = {"split": split, "experts": "split", "backend": backend.get("triton")}
    got = mla_stack.mla_stack_over_ranks(ids.cuda(), *on_gpu, step, v32.CONFIG, **options)
    for logits in got.logits:
        assert v32.close(logits.cpu(), whole.logits)
