"""Faults of lengths, positions, tables, slots and entries: dumps by hand, damaged in each way, and the cause named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsacp_npu.validation.core import Finding
from tests.validate.dumps import report_of

Dump = dict[str, Any]


def ints(*values: int) -> np.ndarray:
    """An int32 vector."""
    return np.array(values, np.int32)


def step(query_lens: Sequence[int], seq_lens: Sequence[int], split: str, **more: Any) -> Dump:
    """The lengths of a step."""
    loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return {"query_start_loc": loc, "seq_lens": ints(*seq_lens), "split": split, **more}


def found(folder: Path, batch: Dump, tensors: dict[int, Dump], cp_size: int) -> list[Finding]:
    """The findings of ranks that wrote these tensors beside the lengths."""
    dumps = [{**batch, "cp_size": cp_size, "cp_rank": rank, **own} for rank, own in tensors.items()]
    return list(report_of(folder, dumps).findings)


def kinds(finding: Finding) -> list[str]:
    """What explains a finding."""
    return [cause.kind for cause in finding.causes]


def assert_named(findings: list[Finding], check: str, *names: str, ranks: Sequence[int] = (0,)) -> None:
    """One finding of the check on each of these ranks, with just these causes."""
    assert [finding.rank for finding in findings] == list(ranks), findings
    for finding in findings:
        assert finding.check == check, finding
        assert kinds(finding) == list(names), finding


# Each case: batch, what ranks wrote, cp_size, causes, ranks that part.
Case = tuple[Dump, dict[int, Dump], int, list[str], list[int]]
REQ = step([145], [145], "contiguous_request")
DRAFT = step([4, 4], [9, 6], "contiguous")
SHARED = step([10, 4], [10, 4], "contiguous")
ROBIN = step([5, 3], [5, 9], "round_robin")
ZIGZAG = step([5], [9], "zigzag")
GRAPH = step([4] * 20, [5] * 9 + [0] * 11, "contiguous")
RADIX = step([3670], [3671], "zigzag")
GAPS = step([128, 2, 126], [128, 2, 126], "contiguous_request")


def seqused(*ranks: list[int]) -> dict[int, Dump]:
    """Extents of the first ranks."""
    return {rank: {"seqused_kv": ints(*values)} for rank, values in enumerate(ranks)}


def queries(*ranks: list[int]) -> dict[int, Dump]:
    """Query offsets of the first ranks."""
    return {rank: {"cu_seqlens_q": ints(*values)} for rank, values in enumerate(ranks)}


def positions(*ranks: list[int]) -> dict[int, Dump]:
    """Positions of the first ranks."""
    return {rank: {"positions": ints(*values)} for rank, values in enumerate(ranks)}


EXTENTS: dict[str, Case] = {
    "A08, one request: two names for one thing": (
        REQ,
        seqused([145], [145]),
        2,
        ["global_key_length", "extent_not_reduced"],
        [0],
    ),
    "A10: global lengths for draft rows": (DRAFT, seqused([9, 6], [9, 6]), 2, ["global_key_length"], [0, 1]),
    "rows on later ranks": (SHARED, seqused([10, 0], [10, 4]), 2, ["extent_not_reduced"], [0]),
    "zigzag's two blocks": (ZIGZAG, seqused([9, 9], [8, 8]), 2, ["one_extent_a_request"], [0, 1]),
    "A02: padded extend": (
        RADIX,
        seqused([459, 3670], [918, 3212]),
        4,
        ["prefix_lost", "padding_in_prefix"],
        [0, 1],
    ),
    "no prefix": (ZIGZAG, seqused([2, 5], [3, 4]), 2, ["prefix_lost"], [0, 1]),
    "padding of 3 in a prefix of 4": (ZIGZAG, seqused([3, 6], [4, 5]), 2, ["padding_in_prefix"], [0, 1]),
    "aligned left": (ZIGZAG, seqused([2, 1], [1, 1]), 2, ["aligned_left"], [0, 1]),
    "A01: across a border": (
        GRAPH,
        {6: {"seqused_kv": ints(*[0] * 17, -2, 0, 0)}},
        8,
        ["negative_extent"],
        [6],
    ),
    "a padded slot with keys": (
        GRAPH,
        {6: {"seqused_kv": ints(*[0] * 15, 4, 4, 2, 0, 0)}, 7: {"seqused_kv": ints(*[0] * 17, 4, 4, 4)}},
        8,
        ["padded_slot_extent"],
        [6, 7],
    ),
    "the other convention": (DRAFT, seqused([9, 2], [9, 6]), 2, ["empty_rows_prefix"], [0, 1]),
    "the other convention, turned round": (
        step([4, 4, 2], [9, 6, 4], "contiguous", empty_extent="prefix"),
        seqused([9, 3, 0], [0, 6, 4]),
        2,
        ["empty_rows_zero"],
        [0, 1],
    ),
    "cumulative extents": (DRAFT, seqused([0, 9, 9], [0, 0, 6]), 2, ["offsets_for_lengths"], [0, 1]),
    "entries": (
        {**ROBIN, "compress_ratio": 4},
        {1: {"seqused_kv": ints(0, 1)}},
        4,
        ["extent_in_entries"],
        [1],
    ),
    "of another rule": (
        step([9], [9], "zigzag"),
        seqused([3, 0], [6, 9]),
        2,
        ["other_split"],
        [0, 1],
    ),
    "A18: compacted": (
        GAPS,
        {127: {"seqused_kv": ints(128)}},
        128,
        ["rows_compacted"],
        [127],
    ),
}


QUERIES: dict[str, Case] = {
    "A05: global offsets": (
        step([10], [10], "contiguous_request"),
        queries([0, 10], [0, 10]),
        4,
        ["global_query_offsets"],
        [0, 1],
    ),
    "no leading zero": (DRAFT, queries([4, 4], [0, 4]), 2, ["leading_zero_missing"], [0, 1]),
    "A11: lengths": (SHARED, queries([7, 0], [3, 4]), 2, ["lengths_not_cumulative"], [0, 1]),
    "A11: offsets of keys": (DRAFT, queries([0, 9, 9], [0, 0, 6]), 2, ["offsets_of_keys"], [0, 1]),
    "A18: rows left out": (DRAFT, queries([0, 4], [0, 4]), 2, ["rows_compacted"], [0, 1]),
    "one row a request": (ZIGZAG, queries([0, 3], [0, 2]), 2, ["row_a_request"], [0, 1]),
    "pads are queries": (
        step([3, 4], [5, 6], "contiguous"),
        {1: {"cu_seqlens_q": ints(0, 0, 4)}},
        2,
        ["pads_counted_as_queries"],
        [1],
    ),
    "A41: zigzag for contiguous": (
        step([8], [8], "zigzag"),
        queries([0, 4], [0, 4]),
        2,
        ["row_a_request"],
        [0, 1],
    ),
    "without graph padding": (
        step([3, 4], [3, 4], "contiguous", num_input_tokens=12),
        queries([0, 3, 4], [0, 0, 3]),
        2,
        ["graph_padding_ignored"],
        [0, 1],
    ),
    "another rank": (SHARED, queries([0, 3, 7], [0, 7, 7]), 2, ["wrong_rank"], [0, 1]),
    "A06: another size": (
        step([16], [16], "contiguous"),
        {3: {"cu_seqlens_q": ints(0, 4)}},
        8,
        ["wrong_cp_size"],
        [3],
    ),
}

POSITIONS: dict[str, Case] = {
    "A04: consecutive": (ROBIN, {1: {"positions": ints(1, 2)}}, 4, ["consecutive_positions"], [1]),
    "A03: not split": (
        step([8], [8], "round_robin"),
        {3: {"positions": np.arange(8, dtype=np.int32)}},
        4,
        ["not_split"],
        [3],
    ),
    "no prefix": (ZIGZAG, positions([0, 1, 4], [2, 3]), 2, ["prefix_lost", "flat_tokens_as_positions"], [0, 1]),
    "flat tokens": (DRAFT, positions([0, 1, 2, 3], [4, 5, 6, 7]), 2, ["flat_tokens_as_positions"], [0, 1]),
    "row numbers": (DRAFT, positions([0, 1, 2, 3], [0, 1, 2, 3]), 2, ["prefix_lost", "rows_as_positions"], [0, 1]),
    "A08: what an operator believes": (
        step([6], [9], "contiguous_request"),
        positions([6, 7, 8], [6, 7, 8]),
        2,
        ["positions_of_global_extents"],
        [0],
    ),
    "A36: 257 is 256": (
        step([2], [259], "contiguous"),
        positions([256], [258]),
        2,
        ["positions_in_16_bit"],
        [0],
    ),
    "zigzag by the other rule": (
        step([5], [5], "zigzag"),
        positions([0, 1], [2, 3, 4]),
        2,
        ["other_split"],
        [0, 1],
    ),
}


CASES = [
    pytest.param(check, case, id=f"{check}, {name}")
    for check, cases in (("key_extents", EXTENTS), ("query_lengths", QUERIES), ("positions", POSITIONS))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("check", "case"), CASES)
def test_the_cause_is_named(tmp_path: Path, check: str, case: Case) -> None:
    batch, tensors, cp_size, names, ranks = case
    assert_named(found(tmp_path, batch, tensors, cp_size), check, *names, ranks=ranks)


def test_details_say_which_rule_rank_or_size(tmp_path: Path) -> None:
    rule = found(tmp_path, step([9], [9], "zigzag"), seqused([3, 0], [6, 9]), 2)
    assert "zigzag_ceil" in rule[0].causes[0].detail
    rank = found(tmp_path, SHARED, queries([0, 3, 7]), 2)
    assert rank[0].causes[0].detail == "it is that of rank 1"
    size = found(tmp_path, step([16], [16], "contiguous"), {3: {"cu_seqlens_q": ints(0, 4)}}, 8)
    assert "rank 3 of 4" in size[0].causes[0].detail


def test_what_no_fault_gives_has_no_cause(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, ZIGZAG, seqused([6, 8]), 2)
    assert (finding.index, finding.expected, finding.got, finding.causes) == ((1,), 9, 8, ())
    assert (finding.request, finding.token) == (0, 4)


def test_pad_rows_of_operators_may_be_left_out(tmp_path: Path) -> None:
    """Round robin over 4 ranks: 5 tokens and 3 pad rows, one of them on rank 1."""
    batch = step([3, 2], [3, 9], "round_robin")
    for extents, loc in (([2, 0], [0, 1, 1]), ([2], [0, 1])):
        tensors = {1: {"seqused_kv": ints(*extents), "cu_seqlens_q": ints(*loc)}}
        assert not found(tmp_path, batch, tensors, 4)
    (finding,) = found(tmp_path, batch, {1: {"seqused_kv": ints(3)}}, 4)
    assert kinds(finding) == ["global_key_length", "extent_not_reduced"]


# --- the step itself ---


@pytest.mark.parametrize(
    ("tensor", "told", "kind"),
    [
        ("query_start_loc", [10, 14], "leading_zero_missing"),
        ("query_start_loc", [10, 4], "lengths_not_cumulative"),
        ("query_start_loc", [0, 7, 7], "local_query_offsets"),
        ("seq_lens", [0, 20, 24], "offsets_for_lengths"),
        ("seq_lens", [10, 4], "prefix_lost"),
    ],
)
def test_a_rank_that_tells_another_step(tmp_path: Path, tensor: str, told: list[int], kind: str) -> None:
    batch = step([10, 4], [20, 4], "contiguous", cp_size=2)
    dumps = [{**batch, "cp_rank": 0, tensor: ints(*told)}, {**batch, "cp_rank": 1}]
    (finding,) = report_of(tmp_path, dumps).findings
    assert (finding.check, finding.tensor, finding.rank) == ("batch", tensor, 0)
    assert kind in kinds(finding)


def test_extents_in_place_of_lengths(tmp_path: Path) -> None:
    """The lengths of the rank that sees most are taken for the step's."""
    batch = step([10, 4], [20, 6], "contiguous", cp_size=2)
    dumps = [{**batch, "cp_rank": 0, "seq_lens": ints(17, 0)}, {**batch, "cp_rank": 1}]
    (finding,) = report_of(tmp_path, dumps).findings
    assert kinds(finding) == ["local_key_lengths"]


def test_all_ranks_without_the_leading_zero(tmp_path: Path) -> None:
    """The step that was meant is found, and the rest compared with it."""
    batch = step([10, 4], [10, 4], "contiguous", cp_size=2)
    loc = batch.pop("query_start_loc")[1:]
    dumps = [
        {**batch, "query_start_loc": loc, "cp_rank": r, "seqused_kv": ints(*k)} for r, k in ((0, [7, 0]), (1, [9, 4]))
    ]
    findings = report_of(tmp_path, dumps).findings
    assert [finding.check for finding in findings] == ["batch", "batch", "key_extents"]
    assert kinds(findings[0]) == ["leading_zero_missing"]


def test_lengths_that_no_step_has(tmp_path: Path) -> None:
    report = report_of(tmp_path, [{"query_start_loc": ints(0, 5), "seq_lens": ints(3), "seqused_kv": ints(3)}])
    (finding,) = report.findings
    assert "3 keys for 5 queries of request 0" in finding.expected
    assert all(result.status == "skipped" for result in report.results if result.check != "batch")


# --- tables and slots ---

# Two requests in blocks of 4: 3 new tokens behind 5, 6 new ones behind none; rows 9, 10 are padding.
TABLES = {"swa_block_table": np.array([[7, 2, -1], [4, 0, 99]], np.int32), "block_size": 4}
PAGED = step([3, 6], [8, 6], "contiguous", num_input_tokens=11, **TABLES)
RIGHT_SLOTS = [9, 10, 11, 16, 17, 18, 19, 0, 1, -1, -1]

SLOTS = {
    "A21: stale": ([*RIGHT_SLOTS[:9], 5, 6], "stale_slots"),
    "own only": ([9, 10, 11, 16, 17, 18, -1, -1, -1, -1, -1], "own_slots_only"),
    "own alone": ([9, 10, 11, 16, 17, 18], "own_slots_only"),
    "no prefix": ([28, 29, 30, 16, 17, 18, 19, 0, 1, -1, -1], "prefix_lost"),
    "blocks of 8": ([61, 62, 63, 32, 33, 34, 35, 36, 37, -1, -1], "other_block_size"),
    "tables swapped": ([1, 2, 3, 28, 29, 30, 31, 8, 9, -1, -1], "table_of_another_request"),
}


@pytest.mark.parametrize(("slots", "kind"), SLOTS.values(), ids=SLOTS)
def test_slots(tmp_path: Path, slots: list[int], kind: str) -> None:
    findings = found(tmp_path, PAGED, {0: {"slot_mapping": ints(*slots)}}, 2)
    assert_named(findings, "slots", kind)
    assert not found(tmp_path, PAGED, {0: {"slot_mapping": ints(*RIGHT_SLOTS)}}, 2)


def test_slots_that_were_mapped_twice(tmp_path: Path) -> None:
    """xLLM-AI/xllm#1623: slots of a cache that is shared out, and slots through the table again."""
    table = np.array([[1, 0]], np.int32)
    batch = step([8], [8], "contiguous", swa_block_table=table, block_size=4)
    right = [4, 5, 6, 7, 0, 1, 2, 3]
    assert not found(tmp_path, batch, {0: {"slot_mapping": ints(*right)}}, 2)
    again = found(tmp_path, batch, {0: {"slot_mapping": ints(0, 1, 2, 3, 4, 5, 6, 7)}}, 2)
    assert "slots_mapped_twice" in kinds(again[0])
    flat = step([8], [8], "contiguous", swa_block_table=np.array([[0, 1]], np.int32), block_size=4)
    shared = found(tmp_path, flat, {0: {"slot_mapping": ints(0, 1, 2, 3)}}, 2)  # tokens 0 2 4 6 of interleave 1
    assert "slots_of_sharded_cache" in kinds(shared[0])


def test_slots_by_flat_token(tmp_path: Path) -> None:
    batch = step([3, 4], [3, 4], "contiguous", swa_block_table=np.array([[7, 2], [4, 0]], np.int32), block_size=4)
    findings = found(tmp_path, batch, {0: {"slot_mapping": ints(28, 29, 30, 19, 0, 1, 2)}}, 2)
    assert_named(findings, "slots", "slots_of_flat_tokens")


def test_tables_of_operator_rows(tmp_path: Path) -> None:
    """Zigzag repeats a request's row; what lies beyond the used blocks is not looked at."""
    batch = step([5, 8], [9, 8], "zigzag", swa_block_table=np.array([[3, 4, 5], [6, 7, -1]], np.int32), block_size=4)
    right = np.array([[3, 4, 77], [3, 4, 5], [6, -5, 0], [6, 7, 0]], np.int32)
    assert not found(tmp_path, batch, {0: {"swa_block_table_rows": right}}, 2)
    whole = found(tmp_path, batch, {0: {"swa_block_table_rows": batch["swa_block_table"]}}, 2)
    assert_named(whole, "swa_tables", "rows_of_batch")
    other = found(tmp_path, batch, {0: {"swa_block_table_rows": batch["swa_block_table"][[1, 1, 0, 0]]}}, 2)
    assert_named(other, "swa_tables", "table_of_another_request")


# --- the compressor ---

# Behind 3 and 9 tokens, 6 and 4 new ones: entries 0, 1 of the first request, entry 2 of the second; ratio 4.
ENTRIES = step(
    [6, 4],
    [9, 13],
    "contiguous",
    compress_ratio=4,
    cmp_block_table=np.array([[5, 1], [2, 3]], np.int32),
    cmp_block_size=2,
)
COMPRESSOR = {
    "A11: local offsets": ("compress_cu_seqlens", [0, 5, 5], "compressor_offsets", "local_query_offsets"),
    "A11: no leading zero": ("compress_cu_seqlens", [6, 10], "compressor_offsets", "leading_zero_missing"),
    "A11: lengths": ("compress_cu_seqlens", [6, 4], "compressor_offsets", "lengths_not_cumulative"),
    "A11: of keys": ("compress_cu_seqlens", [0, 9, 22], "compressor_offsets", "offsets_of_keys"),
    "starts at 0": ("num_computed_tokens", [0, 0], "compressor_starts", "starts_at_zero"),
    "starts at the end": ("num_computed_tokens", [9, 13], "compressor_starts", "start_is_end"),
    "offsets of own rows": ("entry_start_loc", [0, 2, 2], "entry_offsets", "entries_of_own_rows"),
    "new tokens alone": ("entry_start_loc", [0, 1, 2], "entry_offsets", "starts_at_zero", "entries_of_new_tokens"),
    "new tokens alone, by number": ("entry_indices", [0, 2, -1, -1], "entries", "entries_of_new_tokens"),
    "rounded up": ("entry_start_loc", [0, 3, 5], "entry_offsets", "entries_rounded_up"),
    "a zero missing": ("entry_start_loc", [2, 3], "entry_offsets", "leading_zero_missing"),
    "counts": ("entry_start_loc", [2, 1], "entry_offsets", "lengths_not_cumulative"),
    "entries from 0": ("entry_indices", [0, 0, -1, -1], "entries", "starts_at_zero"),
    "stale": ("entry_slots", [10, 11, 6, 4], "entry_slots", "stale_slots"),
    "one behind": ("entry_slots", [11, 2, 7, -1], "entry_slots", "entry_off_by_one"),
    "another table": ("entry_slots", [4, 5, 2, -1], "entry_slots", "table_of_another_request"),
    "blocks of 4": ("entry_slots", [20, 21, 10, -1], "entry_slots", "other_block_size"),
    "from 0": ("entry_slots", [10, 11, 4, -1], "entry_slots", "prefix_lost"),
}
RIGHT_ENTRIES = {
    "compress_cu_seqlens": [0, 6, 10],
    "num_computed_tokens": [3, 9],
    "entry_start_loc": [0, 2, 3],
    "entry_requests": [0, 0, 1, -1],
    "entry_indices": [0, 1, 2, -1],
    "entry_slots": [10, 11, 6, -1],
}


def test_right_entries(tmp_path: Path) -> None:
    assert not found(tmp_path, ENTRIES, {0: {name: ints(*values) for name, values in RIGHT_ENTRIES.items()}}, 2)


@pytest.mark.parametrize("case", COMPRESSOR.values(), ids=COMPRESSOR)
def test_the_compressors_side(tmp_path: Path, case: tuple[Any, ...]) -> None:
    tensor, values, check, *names = case
    findings = found(tmp_path, ENTRIES, {0: {tensor: ints(*values)}}, 2)
    assert_named(findings, check, *names)


def test_start_of_the_ranks_piece(tmp_path: Path) -> None:
    """Rank 1 has tokens from position 8 and 9 on; rank 0 is right by luck."""
    findings = found(tmp_path, ENTRIES, {1: {"num_computed_tokens": ints(8, 9)}}, 2)
    assert_named(findings, "compressor_starts", "start_is_local", ranks=[1])


def test_an_entry_that_is_counted_one_token_late(tmp_path: Path) -> None:
    """GDzhu01/vllm-ascend-deepseekv4#76: n = 3, then n = 4: the 4th token completes entry 0."""
    batch = step([1], [4], "contiguous", compress_ratio=4)
    assert not found(tmp_path, batch, {0: {"entry_start_loc": ints(0, 1)}}, 1)
    assert "entries_one_late" in kinds(found(tmp_path, batch, {0: {"entry_start_loc": ints(0, 0)}}, 1)[0])


def test_entries_at_rows_of_tokens(tmp_path: Path) -> None:
    table = np.array([[5, 1, 0, 2, 3]], np.int32)
    batch = step([8], [8], "contiguous", compress_ratio=4, cmp_block_table=table, cmp_block_size=2)
    findings = found(tmp_path, batch, {0: {"entry_slots": ints(10, 0)}}, 1)  # entries 0, 1 at rows 0 and 4
    assert_named(findings, "entry_slots", "entries_at_token_rows")


def test_a_padded_slot_may_start_anywhere_below_zero(tmp_path: Path) -> None:
    batch = step([6, 4], [9, 0], "contiguous", compress_ratio=4)
    for start in (0, -4):
        assert not found(tmp_path, batch, {0: {"num_computed_tokens": ints(3, start)}}, 2)
