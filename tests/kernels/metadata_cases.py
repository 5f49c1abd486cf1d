"""Launches of the metadata kernels, with what `dsacp_ref` makes of the same batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from dsacp_npu.kernels._language import tl, triton
from dsacp_npu.kernels.metadata import (
    block_extents_kernel,
    contiguous_extents_kernel,
    page_extents_kernel,
    quotient_and_rest,
    round_robin_extents_kernel,
)
from dsacp_npu.kernels.queries import query_rows_kernel
from dsacp_ref.config import split_rule
from dsacp_ref.extents import build_cp_local_metadata, local_extents, query_positions, query_rows
from tests.compare import assert_same
from tests.kernels.case import Case

__all__ = ["CASES"]

BELOW_ONE = 1 - 2**-20
UNSET = -77
# Empty requests, decode rows, a prefix hit, and a padded graph slot at the end; more requests than a block of 8.
QUERY_LENS = (3, 0, 1, 1, 17, 0, 40, 5, 1, 9, 2, 4)
SEQ_LENS = (7, 6, 30, 1, 17, 0, 65, 5, 2, 9, 12, 0)


@triton.jit(do_not_specialize=["count", "divisor", "inverse"])
def quotient_kernel(numbers_ptr, quotients_ptr, rests_ptr, count, divisor, inverse, BLOCK: tl.constexpr):
    """Quotients and rests of a row of numbers."""
    lane = tl.arange(0, BLOCK)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        number = tl.load(numbers_ptr + first + lane, mask=first + lane < count, other=0)
        quotient, rest = quotient_and_rest(number, divisor, inverse)
        tl.store(quotients_ptr + first + lane, quotient, mask=first + lane < count)
        tl.store(rests_ptr + first + lane, rest, mask=first + lane < count)


def int32(values: Sequence[int]) -> np.ndarray:
    """A row of integers. None of them lies in this module: the interpreter compares a kernel's globals."""
    return np.array(values, np.int32)


def offsets_of(lengths: Sequence[int]) -> np.ndarray:
    """``[0] + cumsum(lengths)``."""
    return int32([0, *accumulate(lengths)])


def batch_pointers() -> dict[str, torch.Tensor]:
    """The arguments that every kernel of operator rows begins with."""
    return {
        "query_start_loc_ptr": torch.tensor(offsets_of(QUERY_LENS)),
        "seq_lens_ptr": torch.tensor(SEQ_LENS, dtype=torch.int32),
    }


def unset(count: int) -> torch.Tensor:
    """A row that a kernel has yet to fill, every element."""
    return torch.full((count,), UNSET, dtype=torch.int32)


def quotients(divisor: int) -> Case:
    """Numbers next to multiples of the divisor, over all of int32."""
    most = 2**31 - 1
    multiples = np.random.default_rng(divisor).integers(0, most // divisor + 1, 60) * divisor
    numbers = np.concatenate([multiples, multiples - 1, multiples + 1, [0, 1, most, most - 1, 2**24 + 1]])
    numbers = np.clip(numbers, 0, most).astype(np.int32)
    got = unset(len(numbers)), unset(len(numbers))

    def check() -> None:
        assert_same(got, (numbers // np.int32(divisor), numbers % np.int32(divisor)), "quotients")

    arguments = {"numbers_ptr": torch.tensor(numbers), "quotients_ptr": got[0], "rests_ptr": got[1]}
    counts = {"count": len(numbers), "divisor": divisor, "inverse": BELOW_ONE / divisor}
    return Case(quotient_kernel, {**arguments, **counts}, {"BLOCK": 64}, 2, check)


def extents(split: str, cp_size: int, cp_rank: int, num_input_tokens: int | None = None, **words: Any) -> Case:
    """One rank's operator rows under a rule."""
    words = {"causal": True, "empty_extent": "zero", **words}
    cut = {"split": split, "num_input_tokens": num_input_tokens}
    want = local_extents(offsets_of(QUERY_LENS), int32(SEQ_LENS), cp_size, cp_rank, **cut, **words)
    got = tuple(unset(len(rows)) for rows in want)
    names = ("cu_seqlens_q_ptr", "seqused_kv_ptr", "request_indices_ptr")
    kernel, counts, switches, programs = rule_of(split, cp_size, cp_rank, num_input_tokens, len(want.seqused_kv))
    if kernel is contiguous_extents_kernel:
        names = (*names[:2], "last_ptr")
    arguments = {**batch_pointers(), **dict(zip(names, got, strict=True)), "num_reqs": len(SEQ_LENS), **counts}
    constexprs = {"CAUSAL": words["causal"], "PREFIX": words["empty_extent"] == "prefix", **switches, "BLOCK": 8}
    if kernel is round_robin_extents_kernel:
        del constexprs["PREFIX"]
    return Case(kernel, arguments, constexprs, programs, lambda: assert_same(got, tuple(want), split))


def rule_of(
    split: str, cp_size: int, cp_rank: int, num_input_tokens: int | None, num_rows: int
) -> tuple[Any, dict[str, Any], dict[str, bool], int]:
    """The kernel of a rule, its counts beside the number of requests, its switches, and its programs."""
    rule = split_rule(split)
    if rule.name == "contiguous":
        slice_rows = -(-(num_input_tokens or sum(QUERY_LENS)) // cp_size)
        counts = {"local_start": slice_rows * cp_rank, "local_end": slice_rows * (cp_rank + 1)}
        return contiguous_extents_kernel, counts, {"KEY_STARTS": False}, 1
    if rule.name == "round_robin":
        counts = {"num_rows": num_rows, "cp_size": cp_size, "cp_rank": cp_rank, "share": 2}
        return round_robin_extents_kernel, counts, {}, 3
    if rule.name == "round_robin_page":
        return page_extents_kernel, {"page_size": rule.page_size, "cp_size": cp_size, "cp_rank": cp_rank}, {}, 1
    paired = rule.name != "contiguous_request"
    num_blocks = cp_size * (1 + paired)
    counts = {"num_blocks": num_blocks, "cp_rank": cp_rank, "inverse": BELOW_ONE / num_blocks}
    return block_extents_kernel, counts, {"BALANCED": rule.name == "zigzag", "PAIRED": paired}, 1


def key_starts(cp_size: int, cp_rank: int, **words: Any) -> Case:
    """The proposal's lengths of a contiguous slice, with the running sum of keys."""
    words = {"causal": True, "empty_extent": "zero", **words}
    want = build_cp_local_metadata(offsets_of(QUERY_LENS), int32(SEQ_LENS), cp_size, cp_rank, None, None, **words)
    got = tuple(unset(len(rows)) for rows in want[:3])
    arguments = {
        **batch_pointers(),
        **dict(zip(("cu_seqlens_q_ptr", "seqused_kv_ptr", "last_ptr"), got, strict=True)),
        "num_reqs": len(SEQ_LENS),
        "local_start": want.local_start,
        "local_end": want.local_end,
    }
    constexprs = {"CAUSAL": words["causal"], "PREFIX": words["empty_extent"] == "prefix", "KEY_STARTS": True}
    check = partial(assert_same, got, want[:3], "local metadata")
    return Case(contiguous_extents_kernel, arguments, {**constexprs, "BLOCK": 8}, 1, check)


def queries(query_lens: tuple[int, ...], beyond: int, *, positions: bool = True) -> Case:
    """Rows and positions of queries, some of them beyond the last row; every fifth extent is 0."""
    cu_seqlens_q = offsets_of(query_lens)
    seqused_kv = int32([0 if row % 5 == 4 else count + 3 * row for row, count in enumerate(query_lens)])
    num_rows = int(cu_seqlens_q[-1]) + beyond
    got = (unset(num_rows), unset(num_rows))
    want = query_rows(cu_seqlens_q, num_rows=num_rows), np.full(num_rows, UNSET, np.int32)
    if positions:
        want = want[0], query_positions(cu_seqlens_q, seqused_kv, num_rows=num_rows)
    arguments = {
        "cu_seqlens_q_ptr": torch.tensor(cu_seqlens_q),
        "seqused_kv_ptr": torch.tensor(seqused_kv),
        "rows_ptr": got[0],
        "positions_ptr": got[1],
        "num_extents": len(query_lens),
        "num_rows": num_rows,
        "share": 2,
    }
    constexprs = {"POSITIONS": positions, "ROWS": 8, "BLOCK": 16}
    return Case(query_rows_kernel, arguments, constexprs, 3, lambda: assert_same(got, want, "queries"))


DRAFT = {"causal": False}
PREFIX = {"empty_extent": "prefix"}
CASES: dict[str, Callable[[], Case]] = {
    **{f"quotients by {divisor}": partial(quotients, divisor) for divisor in (1, 2, 3, 7, 14, 64, 2**21 - 1)},
    "contiguous": partial(extents, "contiguous", 3, 1),
    "contiguous alone": partial(extents, "contiguous", 1, 0),
    "contiguous padded": partial(extents, "contiguous", 4, 3, 97),
    "contiguous prefix": partial(extents, "contiguous", 3, 1, **PREFIX),
    "contiguous draft": partial(extents, "contiguous", 3, 1, **DRAFT),
    "key starts": partial(key_starts, 3, 1),
    "key starts prefix": partial(key_starts, 3, 2, **PREFIX),
    "key starts draft": partial(key_starts, 3, 0, **DRAFT),
    **{
        f"{split}{name}": partial(extents, split, 3, 1, **words)
        for split in ("contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded")
        for name, words in (("", {}), (" prefix", PREFIX), (" draft", DRAFT))
    },
    "zigzag alone": partial(extents, "zigzag", 1, 0),
    "round robin": partial(extents, "round_robin", 3, 2),
    "round robin padded": partial(extents, "round_robin", 4, 1, 120),
    "round robin draft": partial(extents, "round_robin", 2, 0, **DRAFT),
    "pages": partial(extents, "round_robin_page(3)", 2, 1),
    "pages of one": partial(extents, "round_robin_page(1)", 2, 0, **PREFIX),
    "long pages": partial(extents, f"round_robin_page({2**31 - 1})", 2, 1, **PREFIX),
    "pages draft": partial(extents, "round_robin_page(4)", 3, 0, **DRAFT),
    "queries": partial(queries, QUERY_LENS, 5),
    "queries one a row": partial(queries, (1,) * 19, 0),
    "queries one a row, then more": partial(queries, (*(1,) * 8, 3, 0, 40), 20),
    "queries of no rows": partial(queries, (0, 0), 18),
    "rows of queries": partial(queries, QUERY_LENS, 5, positions=False),
}
