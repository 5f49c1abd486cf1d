"""Metadata of one rank's step: the operator rows of every split rule.

Offsets are written where they begin (``[0]`` and the running sum in one go): entry ``num_reqs`` is the total, so one
vector a block of requests writes all of them and no element is stored alone. Every count and address is an argument
without specialisation, so one binary serves any number of requests.

All numbers are int32; float32 quotients are corrected to exact ones. Nobody has checked offsets on a device, so kernels
whose stores lie where offsets say cut them to the rows there are. Pages are the exception: only the host can count
them, from offsets that it has checked.
"""

from typing import Any, NamedTuple

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels._records import Compilation

__all__ = [
    "TILES",
    "Tile",
    "block_extents_kernel",
    "compilations",
    "contiguous_extents_kernel",
    "page_extents_kernel",
    "round_robin_extents_kernel",
]

# The arguments of the kernels, none of which Triton may specialise on: counts change at every step, and so does the
# alignment of addresses within a buffer.
SLICE_POINTERS = ("query_start_loc_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "seqused_kv_ptr", "last_ptr")
SLICE_COUNTS = ("num_reqs", "local_start", "local_end")
ROW_POINTERS = (*SLICE_POINTERS[:-1], "request_indices_ptr")
BLOCK_COUNTS = ("num_reqs", "num_blocks", "cp_rank")
ROBIN_COUNTS = ("num_reqs", "num_rows", "cp_size", "cp_rank", "share")
PAGE_COUNTS = ("num_reqs", "page_size", "cp_size", "cp_rank")


class Tile(NamedTuple):
    """A kernel's sizes, which are constexprs, and the launch options of a GPU.

    BLOCK elements are computed and written at a time; ROWS operator rows are one task where a kernel has it.
    """

    sizes: dict[str, int]
    options: dict[str, int]


ASCEND = {
    "requests": Tile({"BLOCK": 1024}, {}),
    "runs": Tile({"BLOCK": 1024}, {}),
}
TILES = {
    "a2": ASCEND,
    "a5": ASCEND,
    "cuda": {
        "requests": Tile({"BLOCK": 1024}, {"num_warps": 8}),
        "runs": Tile({"BLOCK": 128}, {"num_warps": 1}),
    },
}


@triton.jit
def clamped(offsets, low, high):
    """Offsets cut to the range from ``low`` to ``high``."""
    return tl.minimum(tl.maximum(offsets, low), high)


@triton.jit
def right_aligned(seq_len, query_len, piece_len, piece_end, CAUSAL: tl.constexpr, PREFIX: tl.constexpr):
    """Keys up to the piece's last query, or all of the request; without queries 0, or with PREFIX up to its end.

    A padded slot has fewer keys than queries and computes to at most 0.
    """
    extent = tl.maximum(seq_len - query_len + piece_end, 0) if CAUSAL else seq_len
    if not PREFIX:
        extent = tl.where(piece_len > 0, extent, 0)
    return extent


@triton.jit
def quotient_and_rest(numbers, divisor, inverse):
    """Exact ``numbers // divisor`` and ``numbers % divisor`` of a vector in [0, 2**31), without a vector division.

    ``inverse`` is the divisor's reciprocal times ``1 - 2**-20``: more than float32 rounds, so no estimate is too large
    and nothing overflows. The first leaves a rest below ``divisor + 2**12``, the second below ``2 * divisor``.
    """
    quotient = (numbers.to(tl.float32) * inverse).to(tl.int32)
    rest = numbers - quotient * divisor
    more = (rest.to(tl.float32) * inverse).to(tl.int32)
    rest = rest - more * divisor
    last = tl.where(rest >= divisor, 1, 0)
    return quotient + more + last, rest - last * divisor


@triton.jit
def block_start(block, size, longer, query_lens, BALANCED: tl.constexpr):
    """Where a block of a request begins: the first ``longer`` blocks hold one token more, or trailing ones fewer."""
    return size * block + tl.minimum(longer, block) if BALANCED else tl.minimum(size * block, query_lens)


@triton.jit
def dealt_before(count, cp_size, cp_rank):
    """How many of the first ``count`` things the rank gets when they are dealt in turn; scalars only."""
    return (count + cp_size - 1 - cp_rank) // cp_size


@triton.jit(do_not_specialize=[*SLICE_POINTERS, *SLICE_COUNTS])
def contiguous_extents_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    seqused_kv_ptr,
    last_ptr,
    num_reqs,
    local_start,
    local_end,
    CAUSAL: tl.constexpr,
    PREFIX: tl.constexpr,
    KEY_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of one slice of the flat stream, one a request; one program.

    A running sum of clamped lengths is the clamped offset itself, so there is no scan for ``cu_seqlens_q``.
    ``last_ptr`` takes ``[0] + cumsum(seqused_kv)`` with KEY_STARTS, which is the one scan (a scalar loop on A2), and
    the request of every row without.
    """
    lane = tl.arange(0, BLOCK)
    origin = clamped(tl.load(query_start_loc_ptr), local_start, local_end)
    keys_before = 0
    for first in range(0, num_reqs + 1, BLOCK):
        request = first + lane
        inside = request < num_reqs
        start = tl.load(query_start_loc_ptr + request, mask=request <= num_reqs, other=0)
        stop = tl.load(query_start_loc_ptr + request + 1, mask=inside, other=0)
        seq_len = tl.load(seq_lens_ptr + request, mask=inside, other=0)
        lower = clamped(start, local_start, local_end)
        upper = clamped(stop, local_start, local_end)
        query_len = stop - start
        piece_end = tl.minimum(tl.maximum(upper - start, 0), query_len)
        extent = right_aligned(seq_len, query_len, upper - lower, piece_end, CAUSAL, PREFIX)
        tl.store(cu_seqlens_q_ptr + request, lower - origin, mask=request <= num_reqs)
        tl.store(seqused_kv_ptr + request, extent, mask=inside)
        if KEY_STARTS:
            extent = tl.where(inside, extent, 0)
            tl.store(last_ptr + request, keys_before + tl.cumsum(extent, 0) - extent, mask=request <= num_reqs)
            keys_before += tl.sum(extent, 0)
        else:
            tl.store(last_ptr + request, request, mask=inside)


@triton.jit(do_not_specialize=[*ROW_POINTERS, *BLOCK_COUNTS, "inverse"])
def block_extents_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    seqused_kv_ptr,
    request_indices_ptr,
    num_reqs,
    num_blocks,
    cp_rank,
    inverse,
    BALANCED: tl.constexpr,
    PAIRED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of rules that cut every request into blocks: block ``cp_rank``, and with PAIRED its mirror image.

    One program; offsets are a scan of each block of requests (a scalar loop on A2) behind a carried sum. ``inverse`` is
    what `quotient_and_rest` takes for ``num_blocks``.
    """
    lane = tl.arange(0, BLOCK)
    queries_before = 0
    for first in range(0, num_reqs + 1, BLOCK):
        request = first + lane
        inside = request < num_reqs
        start = tl.load(query_start_loc_ptr + request, mask=inside, other=0)
        stop = tl.load(query_start_loc_ptr + request + 1, mask=inside, other=0)
        seq_len = tl.load(seq_lens_ptr + request, mask=inside, other=0)
        query_len = stop - start
        size, longer = quotient_and_rest(query_len, num_blocks, inverse)
        if not BALANCED:
            size += tl.where(longer > 0, 1, 0)
        end = block_start(cp_rank + 1, size, longer, query_len, BALANCED)
        length = end - block_start(cp_rank, size, longer, query_len, BALANCED)
        extent = right_aligned(seq_len, query_len, length, end, CAUSAL, PREFIX)
        if PAIRED:
            end = block_start(num_blocks - cp_rank, size, longer, query_len, BALANCED)
            mirrored = end - block_start(num_blocks - 1 - cp_rank, size, longer, query_len, BALANCED)
            mirrored_extent = right_aligned(seq_len, query_len, mirrored, end, CAUSAL, PREFIX)
            lengths = length + mirrored
            begin = queries_before + tl.cumsum(lengths, 0) - lengths
            row = 2 * first + tl.arange(0, 2 * BLOCK)
            num_rows = 2 * num_reqs
            tl.store(cu_seqlens_q_ptr + row, tl.interleave(begin, begin + length), mask=row <= num_rows)
            tl.store(seqused_kv_ptr + row, tl.interleave(extent, mirrored_extent), mask=row < num_rows)
            tl.store(request_indices_ptr + row, row >> 1, mask=row < num_rows)
        else:
            lengths = length
            begin = queries_before + tl.cumsum(lengths, 0) - lengths
            tl.store(cu_seqlens_q_ptr + request, begin, mask=request <= num_reqs)
            tl.store(seqused_kv_ptr + request, extent, mask=inside)
            tl.store(request_indices_ptr + request, request, mask=inside)
        queries_before += tl.sum(lengths, 0)


@triton.jit(do_not_specialize=[*ROW_POINTERS, *ROBIN_COUNTS])
def round_robin_extents_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    seqused_kv_ptr,
    request_indices_ptr,
    num_reqs,
    num_rows,
    cp_size,
    cp_rank,
    share,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of flat tokens ``cp_rank, cp_rank + cp_size, ...``, one a token, then pad rows up to ``num_rows``.

    The rank's tokens of a request are consecutive rows, and the first of them follows from the request's start alone:
    no request waits for the one before it. ``share`` programs write one request's rows.
    """
    lane = tl.arange(0, BLOCK)
    for task in range(tl.program_id(0), num_reqs * share, tl.num_programs(0)):
        request = task // share
        start = tl.load(query_start_loc_ptr + request)
        stop = tl.load(query_start_loc_ptr + request + 1)
        seq_len = tl.load(seq_lens_ptr + request)
        begin = tl.maximum(dealt_before(start, cp_size, cp_rank), 0) + (task - request * share) * BLOCK
        end = tl.minimum(dealt_before(stop, cp_size, cp_rank), num_rows)
        for first in range(begin, end, share * BLOCK):
            row = first + lane
            inside = row < end
            piece_end = row * cp_size + (cp_rank + 1 - start)
            extent = right_aligned(seq_len, stop - start, 1, piece_end, CAUSAL, True)
            tl.store(cu_seqlens_q_ptr + row, row, mask=inside)
            tl.store(seqused_kv_ptr + row, lane * 0 + extent, mask=inside)
            tl.store(request_indices_ptr + row, lane * 0 + request, mask=inside)
    num_tokens = tl.load(query_start_loc_ptr + num_reqs)
    used = clamped(dealt_before(num_tokens, cp_size, cp_rank), 0, num_rows)
    for first in range(used + tl.program_id(0) * BLOCK, num_rows + 1, tl.num_programs(0) * BLOCK):
        row = first + lane
        tl.store(cu_seqlens_q_ptr + row, lane * 0 + used, mask=row <= num_rows)
        tl.store(seqused_kv_ptr + row, lane * 0, mask=row < num_rows)
        tl.store(request_indices_ptr + row, lane * 0 - 1, mask=row < num_rows)


@triton.jit(do_not_specialize=[*ROW_POINTERS, *PAGE_COUNTS])
def page_extents_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    seqused_kv_ptr,
    request_indices_ptr,
    num_reqs,
    page_size,
    cp_size,
    cp_rank,
    CAUSAL: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows of every cp_size-th page of each request, as many on every rank; one program, request after request.

    Rows and queries of the requests before are carried as scalars. Only a request's last page is short, so the queries
    before the rank's turn k are ``k * page_size``, or all that the rank has of the request.
    """
    lane = tl.arange(0, BLOCK)
    rows_before = 0
    queries_before = 0
    for request in range(num_reqs):
        start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - start
        seq_len = tl.load(seq_lens_ptr + request)
        whole = query_len // page_size
        rest = query_len - whole * page_size
        pages = whole + tl.where(rest > 0, 1, 0)
        turns = dealt_before(pages, cp_size, 0)
        mine = dealt_before(whole, cp_size, cp_rank)
        queries = mine * page_size + (dealt_before(whole + 1, cp_size, cp_rank) - mine) * rest
        for first in range(0, turns, BLOCK):
            turn = first + lane
            inside = turn < turns
            page = turn * cp_size + cp_rank
            # A page's number is cut to the whole pages before it is multiplied: a page may end beyond 2**31.
            piece_start = tl.minimum(page, whole) * page_size + tl.where(page > whole, rest, 0)
            piece_end = tl.minimum(page + 1, whole) * page_size + tl.where(page >= whole, rest, 0)
            extent = right_aligned(seq_len, query_len, piece_end - piece_start, piece_end, CAUSAL, PREFIX)
            before = tl.where(turn <= mine, turn * page_size, queries)
            row = rows_before + turn
            tl.store(cu_seqlens_q_ptr + row, queries_before + before, mask=inside)
            tl.store(seqused_kv_ptr + row, extent, mask=inside)
            tl.store(request_indices_ptr + row, lane * 0 + request, mask=inside)
        rows_before += turns
        queries_before += queries
    tl.store(cu_seqlens_q_ptr + rows_before + lane, lane * 0 + queries_before, mask=lane < 1)


# Which extents there are: causal without and with the prefix of rows without queries, and a draft's.
WORDS = ({"CAUSAL": True, "PREFIX": False}, {"CAUSAL": True, "PREFIX": True}, {"CAUSAL": False, "PREFIX": False})


def typed(pointers: tuple[str, ...], counts: tuple[str, ...]) -> dict[str, str]:
    """The signature of a kernel over int32 rows and counts."""
    return {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(counts, "i32")}


def compilations(family: str) -> list[Compilation]:
    """Everything that the launchers compile for a family of targets."""
    tiles = TILES[family]
    contiguous = typed(SLICE_POINTERS, SLICE_COUNTS)
    block = {**typed(ROW_POINTERS, BLOCK_COUNTS), "inverse": "fp32"}
    robin, page = typed(ROW_POINTERS, ROBIN_COUNTS), typed(ROW_POINTERS, PAGE_COUNTS)
    found = []

    def add(name: str, kernel: Any, signature: dict[str, str], tile: str, switches: dict[str, bool]) -> None:
        words = " ".join(word.lower() for word, on in switches.items() if on) or "plain"
        found.append(Compilation(f"metadata/{name} {words}", kernel, signature, {**switches, **tiles[tile].sizes}))

    for words in WORDS:
        for key_starts in (False, True):
            switches = {**words, "KEY_STARTS": key_starts}
            add("contiguous", contiguous_extents_kernel, contiguous, "requests", switches)
        for balanced, paired in ((False, False), (True, True), (False, True)):
            switches = {**words, "BALANCED": balanced, "PAIRED": paired}
            add("blocks", block_extents_kernel, block, "requests", switches)
        add("pages", page_extents_kernel, page, "runs", words)
    for on in (False, True):
        add("round robin", round_robin_extents_kernel, robin, "runs", {"CAUSAL": on})
    return found
