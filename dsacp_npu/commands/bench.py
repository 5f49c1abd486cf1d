"""Benchmarks: rates of the reference against the same run's matrix multiply, its memory, and metadata times.

Numbers of one run belong together: a machine's speed drifts, so every rate stands beside a float32 matrix multiply
timed just before and after it, and ratios are what to quote. Needs numpy only; the sections of the mirror
(`bench_torch`, `bench_ranks`, `bench_swap`, `bench_splits`) need torch, and are left out without it. Nothing here is a
test.
"""

from __future__ import annotations

import argparse
import platform
import time
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np

from dsacp_npu.commands.progress import waiting
from dsacp_ref import attention, extents, indexer
from dsacp_ref.spec import check_choice, check_int, contract_error

# One V4-Flash layer.
HEADS, HEAD_DIM, WINDOW = 64, 512, 128
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 512
BLOCK = 128  # rows a block of every cache
SCALE = HEAD_DIM**-0.5

EXAMPLES = """\
examples:
  %(prog)s --only metadata
  %(prog)s --only core --only dense --tokens 1024 --repeats 3
  %(prog)s --only splits --trace requests.csv
  %(prog)s --device cuda

It writes nothing but its tables, and compares nothing with earlier runs: quote ratios of one run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.epilog = EXAMPLES
    what = parser.add_argument_group("what runs")
    what.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: the Triton kernels on an NVIDIA GPU, 4096 queries whatever --tokens says (default cpu)",
    )
    names = sorted({*SECTIONS, *COUNTED_SECTIONS, *CUDA_SECTIONS})
    words = f"a section to run, as often as needed (default all of the device's): {', '.join(names)}"
    what.add_argument("--only", choices=names, metavar="SECTION", action="append", help=words)
    words = "splits: also count batches of this service's requests, as `parity --trace`"
    what.add_argument("--trace", metavar="FILE", help=words)
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        default=8192,
        help="tokens of the prompt (default 8192; torch-layer and -swap take at most 4096, torch-ranks also twice)",
    )
    sizes.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        default=5,
        help="timed runs of each rate; the median counts (default 5; torch-layer, -ranks and -swap at most 3)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    tokens = check_int("--tokens", args.tokens, BLOCK)
    repeats = check_int("--repeats", args.repeats, 1)
    sections = CUDA_SECTIONS if args.device == "cuda" else (*SECTIONS, *COUNTED_SECTIONS)
    for name in args.only or ():
        check_choice(f"--only with --device {args.device}", name, sections)
    chosen = args.only or sections
    if args.trace is not None and "splits" not in chosen:
        raise contract_error("--trace", "be given with section splits", f"sections {', '.join(chosen)}")
    if args.device == "cuda":
        return int(import_module("dsacp_npu.commands.bench_cuda").run(args.only))
    print(f"numpy {np.__version__}, Python {platform.python_version()}, {platform.machine()}; random float32 data")
    for place, name in enumerate(chosen, 1):
        print(flush=True)
        with waiting(f"{name}, {place} of {len(chosen)}"):
            if name in COUNTED_SECTIONS:
                COUNTED_SECTIONS[name](args.trace)
            else:
                SECTIONS[name](tokens, repeats)
    return 0


# --- a prompt's tensors ---


def normal(*shape: int) -> extents.Float:
    """Random float32 of this shape, the same in every run."""
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def cache_of(rows: int, width: int) -> tuple[extents.Float, extents.Int32]:
    """A cache of as many rows in shuffled blocks, and the one-request table that orders them."""
    blocks = -(-rows // BLOCK)
    order = np.random.default_rng(1).permutation(blocks).astype(np.int32)
    return normal(blocks, BLOCK, width), order[None]


def lengths(tokens: int) -> tuple[extents.Int32, extents.Int32]:
    """Offsets and extent of one prompt without a prefix."""
    return np.array([0, tokens], np.int32), np.array([tokens], np.int32)


def ragged_batch(num_reqs: int) -> tuple[extents.Int32, extents.Int32]:
    """Offsets and lengths of requests with 0 to 39 new tokens and 0 to 99 earlier ones."""
    rng = np.random.default_rng(num_reqs)
    query_lens = rng.integers(0, 40, num_reqs)
    loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return loc, (query_lens + rng.integers(0, 100, num_reqs)).astype(np.int32)


# --- timing ---


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def matmul_rate() -> float:
    """FLOP per second of a float32 matrix multiply, now."""
    size = 2048
    a = normal(size, size)
    return 2 * size**3 / median(seconds(lambda: a @ a) for _ in range(3))


def rates(call: Callable[[], object], flops: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds of every run, and its rate as a share of the matrix multiplies just before and after it."""
    runs, before = [], matmul_rate()
    for _ in range(repeats):
        took, after = seconds(call), matmul_rate()
        runs.append((took, flops / took / ((before + after) / 2)))
        before = after
    return runs


def shares(runs: list[tuple[float, float]]) -> str:
    """Median share of the matrix multiply's rate, and its range."""
    percent = [100 * share for _, share in runs]
    return f"{median(percent):5.1f} % of matmul ({min(percent):.0f} to {max(percent):.0f})"


def microseconds(call: Callable[[], object]) -> float:
    """Median time of a short call over batches of calls."""
    call()
    batch = 200
    return median(seconds(lambda: [call() for _ in range(batch)]) for _ in range(15)) / batch * 1e6


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that a call holds beyond what is there already, its result included."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# --- sections ---


def core_inputs(tokens: int) -> tuple[Any, ...]:
    """Queries, caches, tables and lengths of one prompt, for `core_call`."""
    q = normal(tokens, HEADS, HEAD_DIM)
    index_q, index_weights = normal(tokens, INDEX_HEADS, INDEX_DIM), normal(tokens, INDEX_HEADS)
    swa_cache, swa_table = cache_of(tokens, HEAD_DIM)
    cmp_cache, cmp_table = cache_of(tokens // 4, HEAD_DIM)
    index_cache = normal(*cmp_cache.shape[:2], INDEX_DIM)
    sink = np.zeros(HEADS, np.float32)
    return q, index_q, index_weights, swa_cache, swa_table, cmp_cache, cmp_table, index_cache, *lengths(tokens), sink


def core_call(indexer: Any, attention: Any, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Index scores, top-k and attention of one ratio-4 layer, by the modules of either package."""
    q, index_q, index_weights, swa_cache, swa_table, cmp_cache, cmp_table, index_cache, loc, used, sink = inputs

    def call() -> Any:
        chosen = indexer.lightning_indexer(
            index_q, index_weights, index_cache, cmp_table, loc, used, compress_ratio=4, index_topk=TOPK
        )
        return attention.selected_attention(
            q,
            swa_cache,
            swa_table,
            cmp_cache,
            cmp_table,
            chosen,
            loc,
            used,
            sink,
            compress_ratio=4,
            window_size=WINDOW,
            softmax_scale=SCALE,
        )

    return call


def ratio_4_core(tokens: int) -> Callable[[], attention.AttentionOutput]:
    """The reference's core of a ratio-4 layer."""
    return core_call(indexer, attention, core_inputs(tokens))


def core_flops(tokens: int) -> int:
    """Products of scores, logits and values that the causal rule leaves, two FLOP each."""
    positions = np.arange(tokens, dtype=np.int64)
    visible = (positions + 1) // 4
    keys = np.minimum(positions + 1, WINDOW) + np.minimum(visible, TOPK)
    return int(4 * HEADS * HEAD_DIM * keys.sum() + 2 * INDEX_HEADS * INDEX_DIM * visible.sum())


def core(tokens: int, repeats: int) -> None:
    """The ratio-4 layer: rate against the matrix multiply, and memory at two lengths."""
    flops = core_flops(tokens)
    runs = rates(ratio_4_core(tokens), flops, repeats)
    print(f"ratio-4 layer: attention, indexer and top-k, {tokens} tokens, {HEADS} heads, {flops / 1e12:.2f} TFLOP")
    print(f"  {median(took for took, _ in runs):6.2f} s  {shares(runs)}, {matmul_rate() / 1e9:.0f} GFLOP/s")
    for count in (tokens // 4, tokens):
        peak, output = peak_bytes(ratio_4_core(count)), count * HEADS * (HEAD_DIM + 1) * 4
        print(f"  {count:6d} tokens: {peak / 1e6:5.0f} MB extra, {output / 1e6:.0f} of them the result")


def dense(tokens: int, repeats: int) -> None:
    """Window-only and ratio-128 layers: dense blocks against their own gather form."""
    q, sink = normal(tokens, HEADS, HEAD_DIM), np.zeros(HEADS, np.float32)
    swa_cache, swa_table = cache_of(tokens, HEAD_DIM)
    cmp_cache, cmp_table = cache_of(max(1, tokens // 128), HEAD_DIM)
    loc, used = lengths(tokens)
    positions = np.arange(tokens, dtype=np.int32)
    window = positions[:, None] - np.arange(WINDOW - 1, -1, -1, dtype=np.int32)
    entries = np.broadcast_to(np.arange(tokens // 128, dtype=np.int32), (tokens, tokens // 128))
    entries = np.where(entries < (positions[:, None] + 1) // 128, entries + np.int32(tokens), np.int32(-1))
    raw = swa_cache[swa_table[0]].reshape(-1, HEAD_DIM)[:tokens]
    packed = np.concatenate([raw, cmp_cache[cmp_table[0]].reshape(-1, HEAD_DIM)])
    options = {"window_size": WINDOW, "softmax_scale": SCALE}
    forms = {
        "window-only": (
            lambda: attention.window_attention(q, swa_cache, swa_table, loc, used, sink, **options),
            np.maximum(window, -1),
        ),
        "ratio-128": (
            lambda: attention.all_entries_attention(
                q, swa_cache, swa_table, cmp_cache, cmp_table, loc, used, sink, compress_ratio=128, **options
            ),
            np.concatenate([np.maximum(window, -1), entries], axis=1),
        ),
    }
    print(f"dense blocks against the gather form, {tokens} tokens, {HEADS} heads")
    for name, (blocks, indices) in forms.items():
        flops = 4 * HEADS * HEAD_DIM * int((indices >= 0).sum())

        def gather(indices: extents.Int32 = indices) -> attention.AttentionOutput:
            out, lse = attention.gathered_attention(q, packed, indices, softmax_scale=SCALE)
            return attention.AttentionOutput(attention.apply_sink(out, lse, sink), lse)

        pairs = [(rates(blocks, flops, 1)[0], rates(gather, flops, 1)[0]) for _ in range(repeats)]
        ratios = [slow[0] / fast[0] for fast, slow in pairs]
        took = median(fast[0] for fast, _ in pairs)
        print(
            f"  {name:12s} {took:6.2f} s  {shares([fast for fast, _ in pairs])}  "
            f"{median(ratios):5.2f} x the gather form ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def metadata(tokens: int, repeats: int) -> None:
    """Lengths and extents of one rank of 8, checks included; no RoPE rows."""
    del tokens, repeats  # short calls have their own sizes and counts
    print("metadata of rank 3 of 8, us per call, checks included")
    print("  requests  build_cp_local_metadata  contiguous extents  zigzag extents")
    for num_reqs in (1, 7, 32, 128, 1024):
        batch = (*ragged_batch(num_reqs), 8, 3)
        build = microseconds(lambda batch=batch: extents.build_cp_local_metadata(*batch, None, None))
        contiguous = microseconds(lambda batch=batch: extents.local_extents(*batch))
        zigzag = microseconds(lambda batch=batch: extents.local_extents(*batch, split="zigzag"))
        print(f"  {num_reqs:8d}  {build:23.1f}  {contiguous:18.1f}  {zigzag:14.1f}")


def of_the_mirror(name: str, module: str = "bench_torch") -> Callable[[int, int], None]:
    """A section of a module that needs torch, which is imported when it is due."""

    def section(tokens: int, repeats: int) -> None:
        try:
            found = import_module(f"dsacp_npu.commands.{module}")
        except ImportError as error:
            print(f"torch-{name} is left out: {error}")
        else:
            getattr(found, name)(tokens, repeats)

    return section


def splits(trace: str | None) -> None:
    """How evenly splits share work, counted; needs torch, which is imported when it is due."""
    try:
        found = import_module("dsacp_npu.commands.bench_splits")
    except ImportError as error:
        print(f"splits is left out: {error}")
    else:
        found.splits(trace)


SECTIONS: dict[str, Callable[[int, int], None]] = {
    "core": core,
    "dense": dense,
    "metadata": metadata,
    "torch-metadata": of_the_mirror("metadata"),
    "torch-layer": of_the_mirror("layer"),
    "torch-ranks": of_the_mirror("ranks", "bench_ranks"),
    "torch-swap": of_the_mirror("swap", "bench_swap"),
}

COUNTED_SECTIONS: dict[str, Callable[[str | None], None]] = {"splits": splits}  # by the file given with --trace

CUDA_SECTIONS = ("attention", "indexer", "latents", "metadata", "rows")  # of `bench_cuda`
