"""Bad batches, groups and cuts are refused: the text names the argument, its rule, what was got and what to try."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsacp_ref import extents, partition, visibility
from dsacp_ref.spec import ContractError
from tests.strategies import int32, read_only

QUERIES, KEYS = int32(0, 3, 5), int32(4, 2)
TABLE = read_only(np.ones((5, 2), np.float32))
PARTITION = partition.partition_tokens(QUERIES, 2, split="zigzag")  # rows 0, 3 and 1, 2, 4
MOST = 2**31 - 1
MOST_OF_TWO = 2**31 - 1 - 4  # of 2 ranks

BATCH = {"query_start_loc": QUERIES, "seq_lens": KEYS}
GROUP = {"cp_size": 2, "cp_rank": 1}
LEGAL: dict[Callable[..., Any], dict[str, Any]] = {
    partition.rank_pieces: {"query_start_loc": QUERIES, **GROUP, "split": "contiguous", "num_input_tokens": None},
    partition.local_token_indices: {
        "query_start_loc": QUERIES,
        **GROUP,
        "split": "contiguous",
        "num_input_tokens": None,
    },
    partition.partition_tokens: {
        "query_start_loc": QUERIES,
        "cp_size": 2,
        "split": "contiguous",
        "num_input_tokens": None,
    },
    extents.local_extents: {**BATCH, **GROUP, "split": "contiguous", "num_input_tokens": None, "causal": True},
    extents.build_cp_local_metadata: {
        **BATCH,
        **GROUP,
        "full_cos": TABLE,
        "full_sin": TABLE,
        "num_input_tokens": None,
        "causal": True,
    },
    extents.token_requests: {"token_indices": int32(0, -1), "query_start_loc": QUERIES},
    extents.token_positions: {"token_indices": int32(0, -1), **BATCH},
    extents.query_rows: {"cu_seqlens_q": QUERIES, "num_rows": 5},
    extents.query_positions: {"cu_seqlens_q": QUERIES, "seqused_kv": KEYS, "num_rows": 5},
    partition.local_rows: {"rows": read_only(np.ones((5, 2))), "partition": PARTITION, "cp_rank": 1},
    partition.restored_rows: {"gathered": read_only(np.ones((5, 2))), "partition": PARTITION},
    partition.converted_rows: {"gathered": read_only(np.ones((5, 2))), "source": PARTITION, "target": PARTITION},
    partition.round_robin_lengths: {"query_start_loc": QUERIES, **GROUP},
    partition.interleave_owners: {"positions": int32(3, -1), "cp_size": 2, "interleave_size": 1},
    partition.interleave_local_indices: {"positions": int32(3, -1), "cp_size": 2, "interleave_size": 1},
    partition.interleave_lengths: {"lengths": int32(3, 0), **GROUP, "interleave_size": 1},
    visibility.window_starts: {"positions": int32(3, -1), "window_size": 2},
    visibility.visible_entries: {"positions": int32(3, -1), "compress_ratio": 4},
    visibility.window_mask: {"positions": int32(3, -1), "num_keys": 4, "window_size": 2},
    visibility.entry_mask: {"positions": int32(3, -1), "num_entries": 4, "compress_ratio": 4},
    visibility.owned_entries: {"starts": int32(0, 2), "ends": int32(2, 2), "compress_ratio": 4},
    visibility.pool_row_starts: {"positions": int32(3, 0), "compress_ratio": 4, "overlap": True},
}


def refuse(function: Callable[..., Any], text: str, **bad: Any) -> None:
    """The legal call with these arguments instead is refused with exactly this text, its inputs as they were."""
    arguments = {**LEGAL[function], **bad}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    before = {name: array.tobytes() for name, array in arrays.items()}
    with pytest.raises(ContractError, match=f"^{re.escape(text)}$") as caught:
        function(**arguments)
    assert type(caught.value) is ContractError
    assert {name: array.tobytes() for name, array in arrays.items()} == before


@pytest.mark.parametrize("function", LEGAL, ids=lambda function: function.__name__)
def test_the_call_that_the_tables_spoil_is_legal(function: Callable[..., Any]) -> None:
    function(**LEGAL[function])


def test_every_public_function_of_the_geometry_is_here() -> None:
    records = {
        "SPLITS",
        "Partition",
        "Pieces",
        "RoundRobinLengths",
        "LocalExtents",
        "CPLocalMetadata",
        "padded_restore_indices",
    }
    public = {*partition.__all__, *extents.__all__, *visibility.__all__} - records
    assert public == {function.__name__ for function in LEGAL}


# --- the same argument, refused alike wherever it stands --------------------------------------------------------------

CP_SIZE = f"cp_size must be an int in [1, {1 << 20}], got "
NOT_INT32 = {  # what every int32 argument refuses
    "list": ([0, 3, 5], "{name} must be an array, got list; dtype int32"),
    "none": (None, "{name} must be an array, got NoneType; dtype int32"),
    "int64": (np.array([0, 3, 5]), "{name} must have dtype int32, got int64; cast {name} first"),
    "float": (np.array([0.0, 3.0]), "{name} must have dtype int32, got float64; cast {name} first"),
    "bool": (np.array([False]), "{name} must have dtype int32, got bool; cast {name} first"),
}
AXES = {
    "query_start_loc": "[num_reqs + 1]",
    "cu_seqlens_q": "[rows + 1]",
    "token_indices": "[num_rows]",
    "positions": "[num_tokens]",
    "starts": "[num_runs]",
}
SHARED = {
    "query_start_loc": {
        "no entry": (int32(), "query_start_loc must have num_reqs + 1 entries, got 0; an empty batch is [0]"),
        "no leading zero": (int32(3, 5), "query_start_loc must start at 0, got 3; prepend the leading zero"),
        "negative": (int32(-1, 3, 5), "query_start_loc must start at 0, got -1; prepend the leading zero"),
        "lengths": (
            int32(0, 3, 2),
            "query_start_loc must not decrease, got [3, 2] at request 1; "
            "it is cumulative: one offset a request, not one length",
        ),
    },
    "seq_lens": {
        "shorter": (
            int32(4),
            "seq_lens must have shape [2], got [1]; one entry per request (query_start_loc has 3 entries)",
        ),
        "cumulative": (
            int32(0, 4, 6),
            "seq_lens must have shape [2], got [3]; one entry per request (query_start_loc has 3 entries)",
        ),
        "column": (
            read_only(np.ones((2, 1), np.int32)),
            "seq_lens must have shape [2], got [2, 1]; one entry per request (query_start_loc has 3 entries)",
        ),
        "fewer keys than queries": (
            int32(4, 1),
            "seq_lens must be 0 (padded slot) or at least the request's query length, got 1 keys for 2 queries of "
            "request 1; seq_lens counts all keys of the request, this step's tokens included",
        ),
        "negative": (
            int32(-1, 2),
            "seq_lens must be 0 (padded slot) or at least the request's query length, got -1 keys for 3 queries of "
            "request 0; seq_lens counts all keys of the request, this step's tokens included",
        ),
    },
    "cp_size": {
        "zero": (0, CP_SIZE + "0"),
        "negative": (-2, CP_SIZE + "-2"),
        "bool": (True, CP_SIZE + "bool True"),
        "float": (2.0, CP_SIZE + "float 2.0"),
        "text": ("2", CP_SIZE + "str '2'"),
        "none": (None, CP_SIZE + "NoneType None"),
        "array": (np.array(2), CP_SIZE + "ndarray array(2)"),
        "huge": (2**20 + 1, CP_SIZE + str(2**20 + 1)),
    },
    "cp_rank": {
        "of the next group": (2, "cp_rank must be an int in [0, 1], got 2; ranks count from 0 within cp_size 2"),
        "negative": (-1, "cp_rank must be an int in [0, 1], got -1; ranks count from 0 within cp_size 2"),
        "bool": (True, "cp_rank must be an int in [0, 1], got bool True; ranks count from 0 within cp_size 2"),
        "float": (0.5, "cp_rank must be an int in [0, 1], got float 0.5; ranks count from 0 within cp_size 2"),
        "none": (None, "cp_rank must be an int in [0, 1], got NoneType None; ranks count from 0 within cp_size 2"),
    },
    "split": {
        "unknown": (
            "zig-zag",
            "split must be one of 'contiguous', 'contiguous_request', 'zigzag', 'zigzag_ceil', 'zigzag_padded', "
            "'round_robin', 'round_robin_page', got 'zig-zag'; a page size is written round_robin_page(128); "
            "aliases: in-seq-split, round-robin-split",
        ),
        "no page size": (
            "round_robin_page",
            "split must carry a page size, got 'round_robin_page'; write round_robin_page(128)",
        ),
        "page size zero": (
            "round_robin_page(0)",
            "split page size must be an int in [1, 2147483647], got 0; a page size is written round_robin_page(128); "
            "aliases: in-seq-split, round-robin-split",
        ),
        "no text": (
            None,
            "split must be a str, got NoneType None; one of contiguous, contiguous_request, zigzag, zigzag_ceil, "
            "zigzag_padded, round_robin, round_robin_page",
        ),
    },
    "num_input_tokens": {
        kind: (
            value,
            f"num_input_tokens must be an int in [5, {MOST_OF_TWO}], got {got}; "
            "query_start_loc ends at 5; padding may add rows, never remove them",
        )
        for kind, value, got in (
            ("below the real count", 4, "4"),
            ("bool", True, "bool True"),
            ("float", 5.0, "float 5.0"),
            ("text", "6", "str '6'"),
            ("array", np.array(6), "ndarray array(6)"),
            ("huge", MOST, str(MOST)),
        )
    },
    "causal": {
        "text": ("False", "causal must be true or false, got str 'False'"),
        "number": (0, "causal must be true or false, got int 0"),
        "none": (None, "causal must be true or false, got NoneType None"),
    },
    "interleave_size": {
        "zero": (0, f"interleave_size must be an int in [1, {MOST // 2}], got 0"),
        "bool": (True, f"interleave_size must be an int in [1, {MOST // 2}], got bool True"),
        "float": (1.0, f"interleave_size must be an int in [1, {MOST // 2}], got float 1.0"),
        "beyond int32 with the group": (
            MOST // 2 + 1,
            f"interleave_size must be an int in [1, {MOST // 2}], got {MOST // 2 + 1}",
        ),
    },
    "window_size": {
        "zero": (0, f"window_size must be an int in [1, {MOST}], got 0"),
        "float": (128.0, f"window_size must be an int in [1, {MOST}], got float 128.0"),
    },
}


def shared_cases() -> list[Any]:
    cases = []
    for function, legal in LEGAL.items():
        for name in legal:
            table = dict(SHARED.get(name, {}))
            if isinstance(legal[name], np.ndarray) and legal[name].dtype == np.int32:
                table |= {kind: (value, text.format(name=name)) for kind, (value, text) in NOT_INT32.items()}
            if name in AXES and not function.__name__.startswith("interleave"):
                axis = "[num_runs]" if function is visibility.pool_row_starts else AXES[name]
                table["matrix"] = (int32(0, 3).reshape(1, 2), f"{name} must have shape {axis}, got [1, 2]")
                table["scalar"] = (np.int32(3), f"{name} must have shape {axis}, got []")
            for kind, (value, text) in table.items():
                cases.append(pytest.param(function, name, value, text, id=f"{function.__name__}-{name}-{kind}"))
    return cases


@pytest.mark.parametrize(("function", "name", "value", "text"), shared_cases())
def test_a_bad_argument_is_refused(function: Callable[..., Any], name: str, value: Any, text: str) -> None:
    refuse(function, text, **{name: value})


# --- one function's own rules -----------------------------------------------------------------------------------------

BY_TOKEN = "the table is by token of the stream, not by position: gather it with the tokens' positions first"
GIVEN_TOGETHER = "full_cos and full_sin must be given together, got one of the two; or None for both"
ALIGNED = "an extent is right-aligned: it ends with the row's last query"
RUNS = "starts and ends must be runs [start, end) with 0 <= start <= end"
OWN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *(
        (
            function,
            {"split": split, "num_input_tokens": 8},
            f"num_input_tokens must equal the 5 tokens of query_start_loc for split {split!r}, got 8; rows beyond the "
            "last request belong to no request; only contiguous and round_robin pad the flat stream",
        )
        for function in (partition.rank_pieces, partition.partition_tokens, extents.local_extents)
        for split in ("contiguous_request", "zigzag", "zigzag_ceil", "zigzag_padded", "round_robin_page(2)")
    ),
    *(
        (
            function,
            {"empty_extent": word},
            f"empty_extent must be one of 'zero', 'prefix', got {word!r}",
        )
        for function in (extents.local_extents, extents.build_cp_local_metadata)
        for word in ("Zero", "", None, 0)
    ),
    *(
        (
            function,
            {"causal": False, "empty_extent": "prefix"},
            "empty_extent must be 'zero' when causal is False, got 'prefix'; a draft row without queries reads 0",
        )
        for function in (extents.local_extents, extents.build_cp_local_metadata)
    ),
    # The RoPE tables.
    (extents.build_cp_local_metadata, {"full_cos": None}, GIVEN_TOGETHER),
    (extents.build_cp_local_metadata, {"full_sin": None}, GIVEN_TOGETHER),
    (
        extents.build_cp_local_metadata,
        {"full_cos": TABLE[:4], "full_sin": TABLE[:4]},
        f"full_cos must have one row per flat token, at least 5, got 4; {BY_TOKEN}",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_cos": TABLE[:4], "full_sin": TABLE[:4], "num_input_tokens": 6},
        f"full_cos must have one row per flat token, at least 5 and at most num_input_tokens 6, got 4; {BY_TOKEN}",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_cos": np.ones((7, 2)), "full_sin": np.ones((7, 2)), "num_input_tokens": 6},
        f"full_cos must have one row per flat token, at least 5 and at most num_input_tokens 6, got 7; {BY_TOKEN}",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_sin": np.ones((6, 2), np.float32)},
        "full_sin must have shape [5, 2], got [6, 2]; cos and sin are one table",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_sin": np.ones((5, 1), np.float32)},
        "full_sin must have shape [5, 2], got [5, 1]; cos and sin are one table",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_sin": np.ones((5, 2))},
        "full_sin must have dtype float32, got float64; cast full_sin first",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_cos": np.ones((5, 2), np.float16)},
        "full_cos must have dtype float32 or float64, got float16; cast full_cos first",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_cos": np.ones(5, np.float32)},
        "full_cos must have shape [n, rope_width], got [5]",
    ),
    (
        extents.build_cp_local_metadata,
        {"full_cos": [[1.0]]},
        "full_cos must be an array, got list; dtype float32 or float64",
    ),
    (extents.build_cp_local_metadata, {"full_sin": [[1.0]]}, "full_sin must be an array, got list; dtype float32"),
    # Sums beyond int32.
    (
        extents.build_cp_local_metadata,
        {"seq_lens": int32(2**30, 2**30), "cp_size": 1, "cp_rank": 0},
        f"local_seq_lens must sum to less than 2**31, got {2**31}; split the batch: offsets are int32",
    ),
    *(
        (
            function,
            {"query_start_loc": int32(0, 1, MOST)},
            f"query_start_loc must end at or before {MOST_OF_TWO}, got {MOST}; "
            "split the batch: token indices are int32",
        )
        for function in (partition.rank_pieces, partition.local_token_indices, partition.partition_tokens)
    ),
    (
        extents.local_extents,
        {"query_start_loc": int32(0, 1, MOST), "seq_lens": int32(1, MOST)},
        f"query_start_loc must end at or before {MOST_OF_TWO}, got {MOST}; split the batch: token indices are int32",
    ),
    # Operator rows.
    (extents.query_rows, {"cu_seqlens_q": int32()}, "cu_seqlens_q must start at 0, got []; prepend the leading zero"),
    (
        extents.query_rows,
        {"cu_seqlens_q": int32(3, 5)},
        "cu_seqlens_q must start at 0, got [3]; prepend the leading zero",
    ),
    (
        extents.query_rows,
        {"cu_seqlens_q": int32(0, 3, 2)},
        "cu_seqlens_q must not decrease, got [0, 3, 2]; it is cumulative, not one length a row",
    ),
    *(
        (
            function,
            {"num_rows": value},
            f"num_rows must be an int in [5, {MOST}], got {got}; cu_seqlens_q is local to the queries",
        )
        for function in (extents.query_rows, extents.query_positions)
        for value, got in ((4, "4"), (True, "bool True"), (5.0, "float 5.0"), (None, "NoneType None"))
    ),
    (
        extents.query_positions,
        {"seqused_kv": int32(4)},
        "seqused_kv must have shape [2], got [1]; cu_seqlens_q has 3 entries",
    ),
    (
        extents.query_positions,
        {"seqused_kv": int32(4, 1)},
        f"seqused_kv must be 0 or at least the row's query length, got 1 keys for 2 queries of row 1; {ALIGNED}",
    ),
    (
        extents.query_positions,
        {"seqused_kv": int32(-2, 2)},
        f"seqused_kv must be 0 or at least the row's query length, got -2 keys for 3 queries of row 0; {ALIGNED}",
    ),
    # Row-aligned arrays.
    *(
        (function, {name: value}, text)
        for function, name, hint in (
            (partition.local_rows, "rows", "one row a token of the partition, without padding"),
            (partition.restored_rows, "gathered", "the ranks' rows end to end, each with its pad rows"),
            (partition.converted_rows, "gathered", "the ranks' rows end to end, each with its pad rows"),
        )
        for value, text in (
            ([0] * 5, f"{name} must be an array with a row axis, got list; {hint}"),
            (np.int32(5), f"{name} must be an array with a row axis, got []; {hint}"),
            (np.ones((6, 2)), f"{name} must have 5 rows, got 6; {hint}"),
            (np.ones((4, 2)), f"{name} must have 5 rows, got 4; {hint}"),
        )
    ),
    (
        partition.converted_rows,
        {"target": partition.partition_tokens(int32(0, 6), 2)},
        "target must partition the 5 tokens of source, got 6; build both from the same query_start_loc",
    ),
    # Keys spread over ranks.
    *(
        (function, {"positions": int32(3, -2)}, "positions must be >= -1, got -2; -1 stands for nothing")
        for function in (partition.interleave_owners, partition.interleave_local_indices)
    ),
    (
        partition.interleave_lengths,
        {"lengths": int32(3, -1)},
        "lengths must be >= 0, got -1; a key count is never negative",
    ),
    # Visibility.
    *(
        (function, {"positions": int32(3, value)}, f"positions must be in [-1, {MOST - 1}], got {value}; {hint}")
        for function in (
            visibility.window_starts,
            visibility.window_mask,
            visibility.visible_entries,
            visibility.entry_mask,
        )
        for value, hint in ((-2, "-1 stands for no position"), (MOST, "-1 stands for no position"))
    ),
    *(
        (
            visibility.pool_row_starts,
            {"positions": int32(3, value)},
            f"positions must be in [0, {MOST - 1}], got {value}; a run starts at a token",
        )
        for value in (-1, MOST)
    ),
    *(
        (function, {"compress_ratio": value}, f"compress_ratio must be an int in [1, {most}], got {got}")
        for function, most in (
            (visibility.visible_entries, MOST),
            (visibility.entry_mask, MOST),
            (visibility.owned_entries, MOST),
            (visibility.pool_row_starts, MOST // 2),
        )
        for value, got in ((0, "0"), (4.0, "float 4.0"), (True, "bool True"), (2**31, str(2**31)))
    ),
    (visibility.window_mask, {"num_keys": -1}, f"num_keys must be an int in [0, {MOST}], got -1"),
    (visibility.entry_mask, {"num_entries": 2.5}, f"num_entries must be an int in [0, {MOST}], got float 2.5"),
    (visibility.pool_row_starts, {"overlap": 1}, "overlap must be true or false, got int 1"),
    (visibility.owned_entries, {"ends": int32(2)}, "ends must have shape [2], got [1]"),
    (
        visibility.owned_entries,
        {"ends": int32(2, 1)},
        f"{RUNS}, got [2, 1) as run 1; ends are exclusive",
    ),
    (
        visibility.owned_entries,
        {"starts": int32(-4, 2)},
        f"{RUNS}, got [-4, 2) as run 0; ends are exclusive",
    ),
]


@pytest.mark.parametrize(
    ("function", "bad", "text"),
    [pytest.param(*case, id=f"{case[0].__name__}-{'-'.join(case[1])}-{i}") for i, case in enumerate(OWN)],
)
def test_a_broken_rule_is_refused(function: Callable[..., Any], bad: dict[str, Any], text: str) -> None:
    refuse(function, text, **bad)


# --- legal, though it looks odd ---------------------------------------------------------------------------------------


def test_numpy_integers_are_integers() -> None:
    for name, value in (("cp_size", np.int64(2)), ("cp_rank", np.int32(1)), ("num_input_tokens", np.int64(7))):
        got = extents.build_cp_local_metadata(**{**LEGAL[extents.build_cp_local_metadata], name: value})
        assert {type(number) for number in got[3:7]} == {int}


def test_a_request_without_queries_may_have_no_keys() -> None:
    local = extents.local_extents(int32(0, 0, 2), int32(0, 2), 1, 0)
    assert local.seqused_kv.tolist() == [0, 2]
