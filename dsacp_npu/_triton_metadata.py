"""Backend `triton`: the operator rows of a rank, and the row and position of every query, one launch a call.

Checks, results and their dtypes are those of `dsacp_npu.extents`. On a device nothing is read: the number of rows
follows from shapes and from ``num_input_tokens``. The offsets of all results lie in one allocation.
"""

from __future__ import annotations

from typing import Any

from dsacp_npu._tensors import Float, Int32, check_host, torch, values_known
from dsacp_npu._triton_launch import check_runs, programs_for, tile_for
from dsacp_npu.extents import (
    CPLocalMetadata,
    LocalExtents,
    check_extent_rule,
    check_extents,
    check_offsets,
    check_sums,
    checked_on_host,
    constant_split_rule,
    local_tables,
    slice_bounds,
)
from dsacp_npu.kernels import queries
from dsacp_npu.kernels.metadata import (
    TILES,
    block_extents_kernel,
    contiguous_extents_kernel,
    page_extents_kernel,
    round_robin_extents_kernel,
)
from dsacp_npu.partition import FLAT_RULES, checked_ranks, padded_token_count
from dsacp_ref.config import SplitRule
from dsacp_ref.spec import INT32_MAX, check_int

__all__ = ["build_cp_local_metadata", "local_extents", "query_positions", "query_rows", "query_rows_and_positions"]

WAVES = 8  # programs of one warp a multiprocessor of a GPU
# More than float32 rounds: an estimated quotient is never too large, so `quotient_and_rest` only ever adds.
BELOW_ONE = 1 - 2**-20
TABLES = {family: {**tiles, **queries.TILES[family]} for family, tiles in TILES.items()}


def local_extents(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    *,
    split: str = "contiguous",
    num_input_tokens: int | None = None,
    causal: bool = True,
    empty_extent: str = "zero",
) -> LocalExtents:
    """`dsacp_npu.extents.local_extents` in one launch, with its limits on devices."""
    checked_on_host(query_start_loc, seq_lens)
    cp_size, cp_rank = checked_ranks(cp_size, cp_rank)
    rule = constant_split_rule(split)
    num_rows = flat_row_count(query_start_loc, cp_size, rule, num_input_tokens)
    check_extent_rule(causal, empty_extent)
    check_runs(query_start_loc)
    batch = query_start_loc.contiguous(), seq_lens.contiguous()
    words = {"CAUSAL": bool(causal), "PREFIX": empty_extent == "prefix"}
    if rule.name == "contiguous":
        return LocalExtents(*contiguous(*batch, num_rows * cp_rank, num_rows, words, key_starts=False))
    if rule.name == "round_robin":
        return round_robin(*batch, cp_size, cp_rank, num_rows, words)
    if rule.name == "round_robin_page":
        return pages(*batch, cp_size, cp_rank, rule.page_size, words)
    return blocks(*batch, cp_size, cp_rank, rule.name, words)


def flat_row_count(query_start_loc: Int32, cp_size: int, rule: SplitRule, num_input_tokens: int | None) -> int:
    """The rank's rows of the padded stream, for the rules that cut it; checked as `pieces_of_rule` checks it."""
    if rule.name == "round_robin_page":
        check_host(f"query_start_loc of split {str(rule)!r}", query_start_loc)  # the number of pages follows from it
    if rule.name in FLAT_RULES or num_input_tokens is not None or values_known(query_start_loc):
        return padded_token_count(query_start_loc, cp_size, rule, num_input_tokens) // cp_size
    return 0


def launch(kernel: Any, tile: str, programs: int, arguments: tuple[Any, ...], **switches: bool) -> None:
    """Run a kernel with the sizes and options for the device of its first argument."""
    chosen = tile_for(TABLES, arguments[0], "metadata", tile)
    kernel[(programs,)](*arguments, **switches, **chosen.sizes, **chosen.options)


def new_rows(like: Int32, *sizes: int) -> tuple[Int32, ...]:
    """int32 rows that are not filled yet, in one allocation."""
    return torch.empty(sum(sizes), dtype=torch.int32, device=like.device).split_with_sizes(sizes)


def new_extents(like: Int32, num_rows: int) -> LocalExtents:
    """Operator rows that are not filled yet."""
    return LocalExtents(*new_rows(like, num_rows + 1, num_rows, num_rows))


def contiguous(
    query_start_loc: Int32, seq_lens: Int32, start: int, count: int, words: dict[str, bool], *, key_starts: bool
) -> tuple[Int32, ...]:
    """Offsets and extents of the slice's rows, and where their keys start or which request they are."""
    num_reqs = len(seq_lens)
    rows = new_rows(seq_lens, num_reqs + 1, num_reqs, num_reqs + key_starts)
    arguments = (query_start_loc, seq_lens, *rows, num_reqs, start, start + count)
    launch(contiguous_extents_kernel, "requests", 1, arguments, **words, KEY_STARTS=key_starts)
    return rows


def blocks(
    query_start_loc: Int32, seq_lens: Int32, cp_size: int, cp_rank: int, name: str, words: dict[str, bool]
) -> LocalExtents:
    """The rows of a rule that cuts each request by itself: one block of it, or one from either end."""
    paired = name != "contiguous_request"
    num_reqs, num_blocks = len(seq_lens), cp_size * (1 + paired)
    rows = new_extents(seq_lens, num_reqs * (1 + paired))
    arguments = (query_start_loc, seq_lens, *rows, num_reqs, num_blocks, cp_rank, BELOW_ONE / num_blocks)
    launch(block_extents_kernel, "requests", 1, arguments, **words, BALANCED=name == "zigzag", PAIRED=paired)
    return rows


def round_robin(
    query_start_loc: Int32, seq_lens: Int32, cp_size: int, cp_rank: int, num_rows: int, words: dict[str, bool]
) -> LocalExtents:
    """One row a token, and pad rows."""
    rows = new_extents(seq_lens, num_rows)
    num_reqs, programs = len(seq_lens), programs_for(seq_lens, cube=False, waves=WAVES)
    arguments = (query_start_loc, seq_lens, *rows, num_reqs, num_rows, cp_size, cp_rank, shares(programs, num_reqs))
    launch(round_robin_extents_kernel, "runs", programs, arguments, CAUSAL=words["CAUSAL"])
    return rows


def shares(programs: int, tasks: int) -> int:
    """How many programs can work on each task."""
    return max(programs // max(tasks, 1), 1)


def pages(
    query_start_loc: Int32, seq_lens: Int32, cp_size: int, cp_rank: int, page_size: int, words: dict[str, bool]
) -> LocalExtents:
    """One row a page, from lengths that the host knows."""
    num_pages = -(-query_start_loc.diff() // page_size)
    rows = new_extents(seq_lens, int((-(-num_pages // cp_size)).sum()))
    arguments = (query_start_loc, seq_lens, *rows, len(seq_lens), page_size, cp_size, cp_rank)
    launch(page_extents_kernel, "runs", 1, arguments, **words)
    return rows


def build_cp_local_metadata(
    query_start_loc: Int32,
    seq_lens: Int32,
    cp_size: int,
    cp_rank: int,
    full_cos: Float | None,
    full_sin: Float | None,
    *,
    num_input_tokens: int | None = None,
    causal: bool = True,
    empty_extent: str = "zero",
) -> CPLocalMetadata:
    """`dsacp_npu.extents.build_cp_local_metadata` in one launch; the tables are cut by torch."""
    known = checked_on_host(query_start_loc, seq_lens)
    tables = full_cos, full_sin
    bounds = slice_bounds(query_start_loc, known, cp_size, cp_rank, *tables, num_input_tokens)
    local_start, local_end, tokens_per_rank, _ = bounds
    check_extent_rule(causal, empty_extent)
    check_runs(query_start_loc)
    words = {"CAUSAL": bool(causal), "PREFIX": empty_extent == "prefix"}
    batch = query_start_loc.contiguous(), seq_lens.contiguous()
    rows = contiguous(*batch, local_start, tokens_per_rank, words, key_starts=True)
    if known is not None:
        check_sums("local_seq_lens", rows[2].numpy(), rows[1])
    return CPLocalMetadata(*rows, *bounds, *local_tables(*tables, local_start, local_end, query_start_loc))


def query_rows(cu_seqlens_q: Int32, *, num_rows: int) -> Int32:
    """`dsacp_npu.extents.query_rows` in one launch."""
    num_rows = checked_row_count(cu_seqlens_q, num_rows)
    (rows,) = new_rows(cu_seqlens_q, num_rows)
    launch_queries(cu_seqlens_q, cu_seqlens_q, rows, rows, num_rows, positions=False)
    return rows


def checked_row_count(cu_seqlens_q: Int32, num_rows: int) -> int:
    """The length of the query array, once the offsets and it are found legal."""
    check_offsets("cu_seqlens_q", cu_seqlens_q)
    least = int(cu_seqlens_q[-1]) if values_known(cu_seqlens_q) else 0
    num_rows = check_int("num_rows", num_rows, least, INT32_MAX, "cu_seqlens_q is local to the queries")
    check_runs(cu_seqlens_q)
    return num_rows


def query_rows_and_positions(cu_seqlens_q: Int32, seqused_kv: Int32, *, num_rows: int) -> tuple[Int32, Int32]:
    """`query_rows` and `query_positions` of the same queries in one launch.

    Args:
        cu_seqlens_q: int32[rows + 1], tokens, local query offsets, first 0.
        seqused_kv: int32[rows], tokens, key extent of each row: 0, or at least the row's query length.
        num_rows: int, tokens, length of the query array, >= ``cu_seqlens_q[-1]``.

    Returns:
        (int32[num_rows], int32[num_rows]): the row of each query, -1 beyond the last row; and its position, -1 also
        where the extent is 0.

    Raises:
        ContractError: a shape, dtype or value above does not hold.
    """
    num_rows = checked_row_count(cu_seqlens_q, num_rows)
    check_extents(cu_seqlens_q, seqused_kv)
    rows, positions = new_rows(cu_seqlens_q, num_rows, num_rows)
    launch_queries(cu_seqlens_q, seqused_kv.contiguous(), rows, positions, num_rows, positions=True)
    return rows, positions


def query_positions(cu_seqlens_q: Int32, seqused_kv: Int32, *, num_rows: int) -> Int32:
    """`dsacp_npu.extents.query_positions` in one launch."""
    return query_rows_and_positions(cu_seqlens_q, seqused_kv, num_rows=num_rows)[1]


def launch_queries(
    cu_seqlens_q: Int32, seqused_kv: Int32, rows: Int32, places: Int32, num_rows: int, *, positions: bool
) -> None:
    """Fill the rows and, if they are wanted, the positions of all queries."""
    if num_rows == 0:
        return
    num_extents, programs = len(cu_seqlens_q) - 1, programs_for(rows, cube=False, waves=WAVES)
    chosen = tile_for(TABLES, rows, "metadata", "queries")
    share = shares(programs, -(-num_extents // chosen.sizes["ROWS"]))
    arguments = (cu_seqlens_q.contiguous(), seqused_kv, rows, places, num_extents, num_rows, share)
    launch(queries.query_rows_kernel, "queries", programs, arguments, POSITIONS=positions)
