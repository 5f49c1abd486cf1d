"""Top-k of float32 scores: the best entries by (score descending, index ascending), NaN as -inf, -0.0 as 0.0.

Two ways, both exact for any input, because they only compare and count:

* ``candidates_kernel`` then ``sorted_kernel``, for GPUs only. A row is cut into strided groups, two or more for each
  entry that is wanted. k groups have a maximum at or above the k-th best maximum, so it is a lower bound of the k-th
  best score. Few entries reach it: of random ones 1.4 k. They are collected, cut down to the k best and sorted. Where
  too many reach it (ties, or all that is high lies in a few groups) bisection over the row itself finds the threshold.
* ``chosen_scores_kernel``, for Ascend: bisection over the bits of the threshold, then over the index of the last entry
  that ties with it; all that is not chosen becomes -inf. No index is computed, so there are no scalar loops; indices
  are left to a top-k operator, for which no tie is left to decide at the edge.

Scores are compared as floats; bisection runs over int32 keys in the same order. Counts are int32.
"""

from typing import Any

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation

__all__ = [
    "CHUNKS",
    "TILES",
    "candidates_kernel",
    "chosen_scores_kernel",
    "compilations",
    "sorted_kernel",
]

# By the most entries that can be wanted: columns of each group in a block, and the launch options of both kernels.
TILES: dict[str, dict[int, dict[str, Any]]] = {
    "cuda": {
        512: {"ROWS": 2, "candidates": {"num_warps": 4}, "sorted": {"num_warps": 1}},
        1024: {"ROWS": 2, "candidates": {"num_warps": 4}, "sorted": {"num_warps": 1}},
        2048: {"ROWS": 2, "candidates": {"num_warps": 8}, "sorted": {"num_warps": 2}},
    },
}

# Columns of a chunk, by whether rows are one chunk at most, which then stays on the chip.
CHUNKS: dict[str, dict[bool, dict[str, int]]] = {
    "a2": {True: {"CHUNK": 4096}, False: {"CHUNK": 4096}},
    "a5": {True: {"CHUNK": 8192}, False: {"CHUNK": 4096}},
    "cuda": {True: {"CHUNK": 8192, "num_warps": 16}, False: {"CHUNK": 4096, "num_warps": 8}},
}

LEAST_KEY = tl.constexpr(-2139095041)  # of -inf
GREATEST_KEY = tl.constexpr(2139095040)  # of inf
NO_KEY = tl.constexpr(-2147483648)  # below every score's
LEAST_SCORE = tl.constexpr(-3.4028234663852886e38)  # of those that are finite
NO_PAIR = tl.constexpr(-(1 << 63))


@triton.jit
def order_keys(scores):
    """Int32 keys that order as the scores do; a NaN gets the key of -inf, and -0.0 that of 0.0."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, -8388608, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """The score with this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def upper_middle(low, high):
    """The mean of two int32, rounded up, without leaving int32."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def kth_largest(keys, k, slack):
    """A key that at least k of these reach, k + slack at most unless they tie with the k-th largest."""
    low = tl.min(keys, 0)
    high = tl.max(keys, 0)
    while low < high:
        middle = upper_middle(low, high)
        count = tl.sum(tl.where(keys >= middle, 1, 0), 0)
        high = tl.where(count >= k, tl.where(count <= k + slack, middle, high), middle - 1)
        low = tl.where(count >= k, middle, low)
    return low


@triton.jit
def block_scores(row_scores, start, num_seen, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Entries and scores of the next ROWS * GROUPS columns; NaN, and what is not seen, as -inf."""
    entries = start + tl.arange(0, GROUPS)[:, None] + tl.arange(0, ROWS)[None, :] * GROUPS
    scores = tl.load(row_scores + entries, mask=entries < num_seen, other=float("-inf"))
    return entries, tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def beats(scores, entries, threshold, last):
    """Which entries are above a threshold, or tie with it up to a last index."""
    return (scores > threshold) | ((scores == threshold) & (entries <= last))


@triton.jit
def group_maxima(row_scores, num_seen, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """The highest score of each strided group of a row."""
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    for start in range(0, num_seen, ROWS * GROUPS):
        _, scores = block_scores(row_scores, start, num_seen, ROWS, GROUPS)
        best = tl.maximum(best, tl.max(scores, 1))
    return best


@triton.jit
def count_beating(row_scores, held, num_seen, threshold, last, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """How many entries of a row are above a threshold, or tie with it up to a last index.

    On an NPU chunks are vectors, ROWS = 1, or the row is one and ``held``, ROWS = 0; their counts are float32 sums.
    """
    if ROWS == 0:
        return count_in_chunk(held, threshold, last, GROUPS)
    elif ROWS == 1:  # noqa: RET505 - what is not compiled has to be a branch
        count = tl.zeros_like(num_seen)
        for start in range(0, num_seen, GROUPS):
            scores = chunk_scores(row_scores, start, num_seen, GROUPS)
            count += count_in_chunk(scores, threshold, last - start, GROUPS)
        return count
    else:
        counts = tl.zeros([GROUPS], tl.int32)
        for start in range(0, num_seen, ROWS * GROUPS):
            entries, scores = block_scores(row_scores, start, num_seen, ROWS, GROUPS)
            counts += tl.sum(beats(scores, entries, threshold, last).to(tl.int32), 1)
        return tl.sum(counts, 0)


@triton.jit
def chunk_scores(row_scores, start, num_seen, CHUNK: tl.constexpr):
    """The scores of the next columns; NaN, and what is not seen, as -inf."""
    entries = start + tl.arange(0, CHUNK)
    scores = tl.load(row_scores + entries, mask=entries < num_seen, other=float("-inf"))
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def count_in_chunk(scores, threshold, last, CHUNK: tl.constexpr):
    """How many of a chunk beat an edge; float32 counts no more than a chunk, which it does exactly."""
    taken = beats(scores, tl.arange(0, CHUNK).to(tl.float32), threshold, last.to(tl.float32))
    return tl.sum(tl.where(taken, 1.0, 0.0), 0).to(tl.int32)


@triton.jit
def exact_edge(row_scores, held, num_seen, k, low, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """The threshold's key and the last index with which exactly k entries are taken; more than k have this low key.

    First the threshold is searched between two keys, then the index between two indices, until k are counted.
    """
    high = tl.zeros_like(low) + GREATEST_KEY
    last = num_seen - 1
    while low < high:
        middle = upper_middle(low, high)
        count = count_beating(row_scores, held, num_seen, score_of(middle), last, ROWS, GROUPS)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
        low = tl.where(count >= k, middle, low)
    first = tl.zeros_like(last)
    middle = first + k - 1  # it, if all entries tie
    while first < last:
        count = count_beating(row_scores, held, num_seen, score_of(low), middle, ROWS, GROUPS)
        first = tl.where(count > k, first, tl.where(count == k, middle, middle + 1))
        last = tl.where(count >= k, middle, last)
        middle = (first + last) >> 1
    return low, last


@triton.jit
def collected(row_found, row_scores, num_seen, threshold, last, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """How many entries beat an edge; the first GROUPS of them that are met are stored, in any order."""
    total = tl.zeros_like(last)
    for start in range(0, num_seen, ROWS * GROUPS):
        entries, scores = block_scores(row_scores, start, num_seen, ROWS, GROUPS)
        marks = beats(scores, entries, threshold, last).to(tl.int32)
        of_group = tl.sum(marks, 1)
        before = total + tl.cumsum(of_group, 0) - of_group
        places = before[:, None] + tl.cumsum(marks, 1) - marks
        tl.store(row_found + places, entries, mask=(marks > 0) & (places < GROUPS))
        total += tl.sum(of_group, 0)
    return total


@triton.jit
def best_of(keys, entries, k):
    """Marks of the k best of these keys, at least as many; the lowest entries first among equals."""
    edge = kth_largest(keys, k, 0)
    taken = keys >= edge
    surplus = tl.sum(taken.to(tl.int32), 0) - k
    if surplus > 0:
        tied = tl.where(keys == edge, -entries, NO_KEY)
        last = kth_largest(tied, tl.sum((keys == edge).to(tl.int32), 0) - surplus, 0)
        taken = (keys > edge) | (tied >= last)
    return taken.to(tl.int32)


@triton.jit(do_not_specialize=["score_stride", "num_columns", "k"])
def candidates_kernel(
    scores, num_visible, found, pairs, score_stride, num_columns, k, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """The best entries of a row as pairs of key and inverted index, int64 [rows, GROUPS / 2]; a row a program.

    Exactly min(k, visible entries) at the start of each row of ``pairs``, in any order; what follows is undefined.
    k <= GROUPS / 2. ``found`` is scratch, int32 [rows, GROUPS].
    """
    row = tl.program_id(0).to(tl.int64)
    row_scores = scores + row * score_stride
    row_found = found + row * GROUPS
    num_seen = tl.minimum(tl.load(num_visible + row), num_columns)
    low = tl.zeros_like(num_seen) + LEAST_KEY
    last = num_seen - 1
    if num_seen > GROUPS:
        low = kth_largest(order_keys(group_maxima(row_scores, num_seen, ROWS, GROUPS)), k, k >> 4)
    total = tl.zeros_like(num_seen) + GROUPS + 1
    refused = False
    while total > GROUPS:
        if refused:
            low, last = exact_edge(row_scores, 0, num_seen, k, low, ROWS, GROUPS)
        total = collected(row_found, row_scores, num_seen, score_of(low), last, ROWS, GROUPS)
        refused = True
    tl.debug_barrier()  # what other threads stored is read next
    slots = tl.arange(0, GROUPS)
    entries = tl.load(row_found + slots, mask=slots < total, other=0)
    keys = order_keys(tl.load(row_scores + entries, mask=slots < total, other=0.0))
    marks = (slots < total).to(tl.int32)
    if total > k:
        marks = best_of(tl.where(slots < total, keys, NO_KEY), entries, k)
    places = tl.cumsum(marks, 0) - marks
    best = (keys.to(tl.int64) << 32) | ((~entries).to(tl.int64) & 0xFFFFFFFF)
    tl.store(pairs + row * (GROUPS // 2) + places, best, mask=marks > 0)


@triton.jit(do_not_specialize=["chosen_stride", "num_columns", "k"])
def sorted_kernel(pairs, num_visible, chosen, chosen_stride, num_columns, k, WIDTH: tl.constexpr):
    """The indices of the pairs of a row, best first, then -1: int32 [rows, k]. One row a program, k <= WIDTH."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDTH)
    num_chosen = tl.minimum(tl.minimum(tl.load(num_visible + row), num_columns), k)
    best = tl.load(pairs + row * WIDTH + places, mask=places < num_chosen, other=NO_PAIR)
    indices = (~tl.sort(best, descending=True)).to(tl.int32)
    row_chosen = chosen + row * chosen_stride
    tl.store(row_chosen + places, tl.where(places < num_chosen, indices, -1), mask=places < k)


@triton.jit(do_not_specialize=["score_stride", "num_columns", "num_rows", "k"])
def chosen_scores_kernel(
    scores,
    num_visible,
    kept,
    score_stride,
    num_columns,
    num_rows,
    k,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
):
    """The scores of the chosen entries, at least the least finite float32, and -inf everywhere else.

    float32 [num_rows, num_columns]; exactly min(k, visible entries) of a row are above -inf.
    HELD: rows have CHUNK columns at most and are read once; else once a step of the search, up to 32 steps for the
    threshold and one a bit of the row's length for ties. CHUNK <= 2^24. A NaN is as -inf.
    """
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_scores = scores + score_stride.to(tl.int64) * row
        row_kept = kept + num_columns.to(tl.int64) * row
        num_seen = tl.minimum(tl.load(num_visible + row), num_columns)
        held = chunk_scores(row_scores, 0, num_seen, CHUNK)
        low = tl.zeros_like(num_seen) + LEAST_KEY
        last = num_seen - 1
        if num_seen > k:
            low, last = exact_edge(row_scores, held, num_seen, k, low, 0 if HELD else 1, CHUNK)
        for start in range(0, num_columns, CHUNK):
            if not HELD:
                held = chunk_scores(row_scores, start, num_seen, CHUNK)
            places = tl.arange(0, CHUNK)
            taken = beats(held, places.to(tl.float32), score_of(low), (last - start).to(tl.float32))
            finite = tl.where(held > LEAST_SCORE, held, LEAST_SCORE)
            best = tl.where(taken, finite, float("-inf"))
            tl.store(row_kept + start + places, best, mask=places < num_columns - start)


ROW_SIZES = {"score_stride": "i32", "num_columns": "i32"}
CHOSEN_SCORES = {"scores": "*fp32", "num_visible": "*i32", "kept": "*fp32", **ROW_SIZES, "num_rows": "i32", "k": "i32"}
CANDIDATES = {"scores": "*fp32", "num_visible": "*i32", "found": "*i32", "pairs": "*i64", **ROW_SIZES, "k": "i32"}
CHOSEN_SIZES = {"chosen_stride": "i32", "num_columns": "i32", "k": "i32"}
SORTED = {"pairs": "*i64", "num_visible": "*i32", "chosen": "*i32", **CHOSEN_SIZES}


def compilations(family: str) -> list[Compilation]:
    """Every way in which a launch compiles these kernels: the two for GPUs on no other family."""
    made = []
    for held, tile in CHUNKS[family].items():
        constexprs = {"CHUNK": tile["CHUNK"], "HELD": held}
        name = "topk/scores of rows that " + ("are held" if held else "are read once a step")
        made.append(Compilation(name, chosen_scores_kernel, CHOSEN_SCORES, constexprs))
    for width, tile in TILES.get(family, {}).items():
        constexprs = {"ROWS": tile["ROWS"], "GROUPS": 2 * width}
        made.append(Compilation(f"topk/candidates for {width}", candidates_kernel, CANDIDATES, constexprs))
        made.append(Compilation(f"topk/{width} sorted", sorted_kernel, SORTED, {"WIDTH": width}))
    return made
