"""Benchmarks of the Triton kernels on an NVIDIA GPU: attention, index scores, top-k, latents, a step's metadata.

Every figure is the median of event-timed calls after warm-ups, with the 10th and 90th percentile; the outputs are
first compared with float64 on a few rows. A call is the backend's function, its checks and launches included. Where
FlashMLA or DeepGEMM can be imported, they are timed on the same data in the same run. Needs torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

from dsacp_npu import backend
from dsacp_npu._tensors import Float, Int32, torch
from dsacp_npu.commands.progress import waiting
from dsacp_npu.extents import build_cp_local_metadata
from dsacp_npu.quant import QuantizedVectors
from dsacp_ref.spec import UnsupportedError

HEAD_DIM, WINDOW, PAGE, CMP_PAGE = 512, 128, 128, 64
INDEX_HEADS, INDEX_DIM = 64, 128
SCALE = HEAD_DIM**-0.5
TOKENS = 4096  # queries, the last ones of a prompt
WARM_UPS, CALLS = 10, 40
AHEAD = 50_000_000  # clock cycles: some 25 ms
CAPTURED = 50  # calls in one graph, so that replaying it costs little a call
ROWS_CHECKED = 6
LOGIT_BOUND = 40.0  # of the data here: normal numbers, scaled


class Prompt(NamedTuple):
    """The last queries of one long prompt, and the paged caches that they read."""

    q: Float
    swa_cache: Float
    swa_table: Int32
    cmp_cache: Float
    cmp_table: Int32
    cu_seqlens_q: Int32
    seqused_kv: Int32
    attn_sink: Float


def run(sections: list[str] | None) -> int:
    """Print the tables of these sections, all if None are named."""
    if not torch.cuda.is_available():
        raise UnsupportedError("bench --device cuda needs an NVIDIA GPU that torch can use; there is none here")
    triton = import_module("triton")
    name = torch.cuda.get_device_name()
    print(f"{name}; torch {torch.__version__}, triton {triton.__version__}; bfloat16, random data, {TOKENS} queries")
    chosen = sections or list(SECTIONS)
    for place, section in enumerate(chosen, 1):
        print(flush=True)
        with waiting(f"{section}, {place} of {len(chosen)}"):
            SECTIONS[section](TOKENS)
    return 0


# --- timing and comparing ---


def milliseconds(call: Callable[[], object]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of a call's time on the device, which is kept waiting until Python is ahead."""
    for _ in range(WARM_UPS):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    tenths = quantiles(times, n=10)
    return median(times), tenths[0], tenths[-1]


def line(what: str, times: tuple[float, float, float], rest: str) -> None:
    """One row of a table."""
    print(f"  {what:44s} {times[0]:8.3f} ms [{times[1]:.3f} {times[2]:.3f}]  {rest}")


def relative_error(got: Float, exact: Float) -> float:
    """Relative Frobenius error against float64."""
    return float((got.double() - exact).norm() / exact.norm())


# --- data ---


def generator(seed: int) -> torch.Generator:
    """Numbers that are the same in every run."""
    return torch.Generator("cuda").manual_seed(seed)


def normal(*shape: int, seed: int) -> Float:
    """Random bfloat16 of this shape."""
    return torch.randn(shape, device="cuda", generator=generator(seed)).bfloat16()


def shuffled_table(num_rows: int, page: int, seed: int) -> Int32:
    """The block table of one request whose blocks lie in random order."""
    blocks = -(-num_rows // page)
    return torch.randperm(blocks, device="cuda", generator=generator(seed))[None].int()


def prompt_of(tokens: int, num_heads: int, num_entries: int, ratio: int) -> Prompt:
    """The last ``tokens`` queries of a prompt that has at least this many entries before them."""
    before = num_entries * ratio if ratio > 1 else WINDOW
    length = before + tokens
    swa_table, entries = shuffled_table(length, PAGE, 1), max(length // max(ratio, 2), 1)
    cmp_table = shuffled_table(entries, CMP_PAGE, 2)
    return Prompt(
        normal(tokens, num_heads, HEAD_DIM, seed=3),
        normal(swa_table.shape[1], PAGE, HEAD_DIM, seed=4),
        swa_table,
        normal(cmp_table.shape[1], CMP_PAGE, HEAD_DIM, seed=5),
        cmp_table,
        torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        torch.tensor([length], dtype=torch.int32, device="cuda"),
        torch.randn(num_heads, device="cuda", generator=generator(6)),
    )


def random_choice(tokens: int, num_entries: int, topk: int) -> Int32:
    """Distinct entries for every query."""
    noise = torch.rand(tokens, num_entries, device="cuda", generator=generator(7))
    return noise.topk(topk, dim=1).indices.int()


def rows_in_order(cache: Float, table: Int32) -> Float:
    """A cache's rows in the order of its one request."""
    return cache[table[0].long()].flatten(0, 1)


# --- attention ---


def attention_of(prompt: Prompt, chosen: Int32 | None, ratio: int, bound: float | None) -> Callable[[], Any]:
    """The backend's call for this layer; the lists that all layers of a step share are made before."""
    ops = backend.get("triton")
    swa, lengths = prompt[1:3], prompt[5:]
    lists = ops.attention_lists(
        prompt.swa_table,
        prompt.cmp_table if ratio > 1 and chosen is None else None,
        *lengths[:2],
        num_queries=len(prompt.q),
        block_sizes=(PAGE, CMP_PAGE),
        window_size=WINDOW,
        compress_ratio=ratio,
    )
    sizes: dict[str, Any] = {"window_size": WINDOW, "softmax_scale": SCALE, "logit_bound": bound, **lists}
    if ratio == 1:
        return lambda: ops.window_attention(prompt.q, *swa, *lengths, **sizes)
    sizes["compress_ratio"] = ratio
    if chosen is None:
        return lambda: ops.all_entries_attention(prompt.q, *swa, *prompt[3:5], *lengths, **sizes)
    return lambda: ops.selected_attention(prompt.q, *swa, *prompt[3:5], chosen, *lengths, **sizes)


def keys_of(prompt: Prompt, row: int, chosen: Int32 | None, ratio: int) -> Float:
    """The keys of one query, in float64."""
    position = int(prompt.seqused_kv) - len(prompt.q) + row
    window = rows_in_order(prompt.swa_cache, prompt.swa_table)[max(position - WINDOW + 1, 0) : position + 1]
    if ratio == 1:
        return window.double()
    entries = rows_in_order(prompt.cmp_cache, prompt.cmp_table)
    picked = entries[: (position + 1) // ratio] if chosen is None else entries[chosen[row].long()]
    return torch.cat([window, picked]).double()


def error_of(out: Float, prompt: Prompt, chosen: Int32 | None, ratio: int) -> float:
    """The error of some rows against float64."""
    rows = torch.linspace(0, len(prompt.q) - 1, ROWS_CHECKED).long().tolist()
    exact = []
    for row in rows:
        keys = keys_of(prompt, row, chosen, ratio)
        logits = torch.cat([prompt.q[row].double() @ keys.T * SCALE, prompt.attn_sink.double()[:, None]], dim=1)
        exact.append(logits.softmax(dim=1)[:, :-1] @ keys)
    return relative_error(out[rows], torch.stack(exact))


def flash_mla(prompt: Prompt, chosen: Int32 | None, ratio: int) -> Callable[[], Any] | None:
    """FlashMLA's sparse prefill on the same keys, laid out as it wants them; None where it cannot be imported."""
    try:
        peer = import_module("flash_mla").flash_mla_sparse_fwd
    except ImportError:
        return None
    tokens, num_heads = prompt.q.shape[:2]
    first = int(prompt.seqused_kv) - tokens - WINDOW + 1
    window = rows_in_order(prompt.swa_cache, prompt.swa_table)[first : int(prompt.seqused_kv)]
    indices = torch.arange(tokens, device="cuda")[:, None] + torch.arange(WINDOW, device="cuda")
    kv = window
    if ratio > 1:
        entries = rows_in_order(prompt.cmp_cache, prompt.cmp_table)
        kv = torch.cat([window, entries])
        if chosen is None:
            positions = torch.arange(tokens, device="cuda") + int(prompt.seqused_kv) - tokens
            visible = (positions + 1) // ratio
            columns = torch.arange(int(visible.max()), device="cuda")
            chosen = torch.where(columns < visible[:, None], columns, -1).int()
        indices = torch.cat([indices, torch.where(chosen >= 0, chosen + len(window), -1)], dim=1)
    width = -(-indices.shape[1] // 128) * 128
    padded = torch.nn.functional.pad(indices, (0, width - indices.shape[1]), value=-1).int()[:, None].contiguous()
    heads = 64 if num_heads < 64 else num_heads
    q = torch.nn.functional.pad(prompt.q, (0, 0, 0, heads - num_heads))
    sink = torch.nn.functional.pad(prompt.attn_sink, (0, heads - num_heads))
    count = torch.full((tokens,), indices.shape[1], dtype=torch.int32, device="cuda")
    kv = kv[:, None].contiguous()
    return lambda: peer(q, kv, padded, SCALE, HEAD_DIM, sink, count)


def gathered_by_torch(prompt: Prompt, chosen: Int32) -> Callable[[], Float]:
    """The selected form in plain torch: keys gathered for 512 queries at a time, two products, a softmax."""
    first = int(prompt.seqused_kv) - len(prompt.q) - WINDOW + 1
    window = rows_in_order(prompt.swa_cache, prompt.swa_table)[first : int(prompt.seqused_kv)]
    kv = torch.cat([window, rows_in_order(prompt.cmp_cache, prompt.cmp_table)])
    near = torch.arange(len(prompt.q), device="cuda")[:, None] + torch.arange(WINDOW, device="cuda")
    indices = torch.cat([near, chosen.long() + len(window)], dim=1)

    def call() -> Float:
        out = torch.empty_like(prompt.q)
        for start in range(0, len(out), 512):
            block = slice(start, start + 512)
            keys = kv[indices[block]]
            logits = (prompt.q[block] @ keys.transpose(1, 2)).float() * SCALE
            sink = prompt.attn_sink.expand(len(logits), -1)[..., None]
            shares = torch.cat([logits, sink], dim=2).softmax(dim=2)[..., :-1]
            out[block] = shares.bfloat16() @ keys
        return out

    return call


ATTENTION = [  # heads, entries, chosen (None: all), ratio
    ("ratio 4, 64 heads, 128 + 512 of 8k", 64, 8192, 512, 4),
    ("ratio 4, 64 heads, 128 + 512 of 32k", 64, 32768, 512, 4),
    ("ratio 4, 128 heads, 128 + 1024 of 8k", 128, 8192, 1024, 4),
    ("ratio 4, 8 heads, 128 + 512 of 8k", 8, 8192, 512, 4),
    ("ratio 4, 16 heads, 128 + 512 of 8k", 16, 8192, 512, 4),
    ("ratio 4, 32 heads, 128 + 512 of 8k", 32, 8192, 512, 4),
    ("window only, 64 heads", 64, 0, None, 1),
    ("window only, 128 heads", 128, 0, None, 1),
    ("ratio 128, 64 heads, 128 + 32..64", 64, 32, None, 128),
    ("ratio 128, 64 heads, 128 + 1024..1056", 64, 1024, None, 128),
]


def attention(tokens: int) -> None:
    """Every form at several sizes, with and without a running maximum, beside FlashMLA and torch."""
    print("attention: TFLOP/s of 4 x heads x 512 x keys x queries; x FlashMLA: its time over ours")
    for name, heads, entries, topk, ratio in ATTENTION:
        prompt = prompt_of(tokens, heads, entries, ratio)
        chosen = random_choice(tokens, entries, topk) if topk else None
        keys = WINDOW * tokens
        if ratio > 1:
            first = int(prompt.seqused_kv) - tokens
            visible = (torch.arange(first, first + tokens) + 1) // ratio
            keys += topk * tokens if topk else int(visible.sum())
        flops = 4 * heads * HEAD_DIM * keys
        peer = flash_mla(prompt, chosen, ratio)
        theirs = milliseconds(peer) if peer else None
        for form, bound in (("fixed reference", LOGIT_BOUND), ("running maximum", None)):
            call = attention_of(prompt, chosen, ratio, bound)
            error = error_of(call().out, prompt, chosen, ratio)
            same = torch.equal(call().out, call().out)
            times = milliseconds(call)
            beside = f"x FlashMLA {theirs[0] / times[0]:.2f}" if theirs else ""
            rest = f"{flops / times[0] / 1e9:6.0f} TFLOP/s  error {error:.1e}  repeats {same}  {beside}"
            rest += f"  Python {microseconds(call):.0f} us"
            line(f"{name}, {form}", times, rest)
        if theirs:
            line("  FlashMLA", theirs, f"{flops / theirs[0] / 1e9:6.0f} TFLOP/s")
        if chosen is not None and heads == 64 and entries == 8192:
            eager = milliseconds(gathered_by_torch(prompt, chosen))
            line("  torch, gathered, bfloat16", eager, f"{flops / eager[0] / 1e9:6.0f} TFLOP/s")


# --- the indexer ---


def scores(tokens: int) -> None:
    """Index scores and the choice of 512 entries, of one prompt's last queries, in bfloat16."""
    ops = backend.get("triton")
    print("indexer: scores and exact top-k, 64 heads of 128; TFLOP/s of 2 x 64 x 128 x entries x queries")
    for entries in (8192, 32768):
        q, weights = normal(tokens, INDEX_HEADS, INDEX_DIM, seed=1), normal(tokens, INDEX_HEADS, seed=2)
        keys = normal(entries, INDEX_DIM, seed=3)
        flops = 2 * INDEX_HEADS * INDEX_DIM * entries * tokens
        got = ops.index_scores(q[:ROWS_CHECKED], weights[:ROWS_CHECKED], keys)
        products = torch.einsum("thd,nd->thn", q[:ROWS_CHECKED].double(), keys.double()).relu()
        error = relative_error(got, (products * weights[:ROWS_CHECKED].double()[..., None]).sum(1))
        times = milliseconds(lambda q=q, weights=weights, keys=keys: ops.index_scores(q, weights, keys))
        line(f"scores alone, {entries} keys", times, f"{flops / times[0] / 1e9:6.0f} TFLOP/s  error {error:.1e}")
        found = torch.randn(tokens, entries, device="cuda", generator=generator(4))
        visible = torch.full((tokens,), entries, dtype=torch.int32, device="cuda")
        for topk in (512, 1024):
            check_choice(ops.selected_entries(found, visible, topk), found, topk)
            times = milliseconds(lambda f=found, v=visible, k=topk: ops.selected_entries(f, v, k))
            theirs = milliseconds(lambda f=found, k=topk: f.topk(k, dim=1, sorted=False))
            read = found.numel() * 4 / times[0] / 1e6
            rest = f"x torch.topk {theirs[0] / times[0]:.2f} ({theirs[0]:.3f} ms)  {read:5.0f} GB/s of one read"
            line(f"top-k {topk} alone, {entries} scores", times, rest)
        table = shuffled_table(entries + tokens // 4, CMP_PAGE, 5)
        cache = normal(table.shape[1], CMP_PAGE, INDEX_DIM, seed=6)
        lengths = [torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, tokens], [entries * 4 + tokens])]

        def step(q: Float = q, w: Float = weights, cache: Float = cache, table: Int32 = table, n: Any = lengths) -> Any:
            return ops.lightning_indexer(q, w, cache, table, *n, compress_ratio=4, index_topk=512)

        line(f"lightning_indexer, {entries} to {entries + tokens // 4} entries", milliseconds(step), "")
        line("  scores in float8 and top-k 512", milliseconds(float8_step(q, weights, keys)), "")
        peer = deep_gemm(q, weights, keys)
        if peer:
            line("  DeepGEMM fp8 scores + torch.topk(512)", milliseconds(peer), "")


def float8_step(q: Float, weights: Float, keys: Float) -> Callable[[], Any]:
    """Scores of float8 queries and keys, a slice at a time, and the choice of 512."""
    launchers, indexer = (import_module(f"dsacp_npu._triton_{name}") for name in ("scores", "indexer"))
    table = shuffled_table(len(keys), WINDOW, 8)
    blocks = keys.view(-1, WINDOW, INDEX_DIM)
    cache = torch.empty_like(blocks)
    cache[table[0].long()] = blocks
    ones = [torch.ones(shape, device="cuda") for shape in (q.shape[:2], cache.shape[:2])]
    coded, stored = (
        QuantizedVectors(part.to(torch.float8_e4m3fn), scale) for part, scale in zip((q, cache), ones, strict=True)
    )
    rows = torch.zeros(len(q), dtype=torch.int32, device="cuda")
    visible, wide = torch.full_like(rows, len(keys)), weights.float()
    return lambda: indexer.chosen_in_slices(
        coded, wide, stored, table, rows, visible, 512, launchers.score_columns(stored, table)
    )


def check_choice(chosen: Int32, found: Float, topk: int) -> None:
    """Stop if the choice is not the stable order's."""
    exact = found.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    if not torch.equal(chosen.long(), exact):
        raise AssertionError("top-k differs from the stable order")


def deep_gemm(q: Float, weights: Float, keys: Float) -> Callable[[], Any] | None:
    """DeepGEMM's fp8 scores, then torch's choice; None where it cannot be imported."""
    try:
        peer = import_module("deep_gemm").fp8_mqa_logits
    except ImportError:
        return None
    coded, scales = keys.to(torch.float8_e4m3fn), torch.ones(len(keys), device="cuda")
    starts = torch.zeros(len(q), dtype=torch.int32, device="cuda")
    ends = torch.full_like(starts, len(keys))
    fp8, wide = q.to(torch.float8_e4m3fn), weights.float()
    return lambda: peer(fp8, (coded, scales), wide, starts, ends, clean_logits=False).topk(512, dim=1, sorted=False)


# --- metadata ---


def metadata(tokens: int) -> None:
    """One rank's lengths and extents, from lengths on the device: in a captured graph, and called from Python."""
    ops = backend.get("triton")
    print(f"metadata of rank 3 of 8, lengths on the device: one of {CAPTURED} in a captured graph, and from Python")
    for num_reqs in (1, 7, 32, 128, 1024):
        lens = torch.randint(1, 40, (num_reqs,), generator=torch.Generator().manual_seed(num_reqs), dtype=torch.int32)
        loc = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)])
        total = int(loc[-1])
        batch = (loc.cuda(), (lens + 50).cuda(), 8, 3, None, None)
        calls = [
            lambda b=batch, n=total, build=build: build(*b, num_input_tokens=n)
            for build in (ops.build_cp_local_metadata, build_cp_local_metadata)
        ]
        replayed = [1000 * milliseconds(captured(call))[0] for call in calls]
        called = [microseconds(call) for call in calls]
        ours, theirs = (
            f"{graph / CAPTURED:5.1f} us, from Python {python:4.0f} us"
            for graph, python in zip(replayed, called, strict=True)
        )
        print(f"  {num_reqs:5d} requests: {ours}; torch's operations: {theirs}")


def microseconds(call: Callable[[], object]) -> float:
    """Median time that Python takes for a call; the device may still be at it."""
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        start = perf_counter()
        call()
        times.append(1e6 * (perf_counter() - start))
    return median(times)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The launches of many calls, recorded once, without the Python that made them."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            call()
    return graph.replay


def rows(tokens: int) -> None:
    """What only moves and turns rows."""
    import_module("dsacp_npu.commands.bench_rows").rows(tokens)


# --- attention over latents ---

LATENT, ROPE_KEY, CHOSEN = 512, 64, 2048
LATENT_HEADS = (128, 16)


def latents(tokens: int) -> None:
    """V3.2's attention over 2048 chosen tokens, beside FlashMLA."""
    ops, scale = backend.get("triton"), (LATENT + ROPE_KEY) ** -0.5
    print("attention over latents, 512 + 64 channels, 2048 tokens; TFLOP/s of 2 x heads x (576 + 512) x 2048 x queries")
    for heads, before in [(heads, before) for heads in LATENT_HEADS for before in (8192, 32768)]:
        table = shuffled_table(before + tokens, CMP_PAGE, 1)
        lengths = [torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, tokens], [before + tokens])]
        q = [normal(tokens, heads, width, seed=3 + width) for width in (LATENT, ROPE_KEY)]
        caches = [normal(table.shape[1], CMP_PAGE, width, seed=4 + width) for width in (LATENT, ROPE_KEY)]
        chosen = random_choice(tokens, before, CHOSEN)

        def call(
            q: Any = q, caches: Any = caches, table: Int32 = table, chosen: Int32 = chosen, n: Any = lengths
        ) -> Any:
            return ops.latent_attention(*q, *caches, table, chosen, *n, softmax_scale=scale)

        whole = torch.cat(q, dim=2)
        keys = rows_in_order(torch.cat(caches, dim=2), table)
        rows = torch.linspace(0, tokens - 1, ROWS_CHECKED).long().tolist()
        picked = keys[chosen[rows].long()].double()
        shares = (whole[rows].double() @ picked.transpose(1, 2) * scale).softmax(dim=2)
        got = call()
        error = relative_error(got.out[rows], shares @ picked[..., :LATENT])
        same = torch.equal(got.out, call().out)
        flops = 2 * heads * (2 * LATENT + ROPE_KEY) * CHOSEN * tokens
        times, peer = milliseconds(call), flash_mla_latents(whole, keys, chosen, scale)
        rest = f"{flops / times[0] / 1e9:6.0f} TFLOP/s  error {error:.1e}  repeats {same}  "
        rest += f"Python {microseconds(call):.0f} us"
        line(f"{heads} heads, 2048 of {before}", times, rest)
        if peer:
            theirs = milliseconds(peer)
            rest = f"{flops / theirs[0] / 1e9:6.0f} TFLOP/s  x FlashMLA {theirs[0] / times[0]:.2f}"
            line("  FlashMLA", theirs, rest)


def flash_mla_latents(q: Float, keys: Float, chosen: Int32, scale: float) -> Callable[[], Any] | None:
    """FlashMLA's sparse prefill on the same keys, in a row; None where it cannot be imported or has no such heads."""
    try:
        peer = import_module("flash_mla").flash_mla_sparse_fwd
    except ImportError:
        return None
    if q.shape[1] % 64:
        return None
    rows, lists = keys[:, None].contiguous(), chosen[:, None].contiguous()
    return lambda: peer(q, rows, lists, scale, LATENT)


SECTIONS: dict[str, Callable[[int], None]] = {
    "attention": attention,
    "indexer": scores,
    "latents": latents,
    "metadata": metadata,
    "rows": rows,
}
