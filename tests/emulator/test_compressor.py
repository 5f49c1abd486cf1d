"""`compressor` in both forms and `compressor_metadata`: numbers, chunks, states, and every edge."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu.emulator import OperatorError, OutOfRangeError, install, remove
from tests.compare import assert_same, assert_within_budget
from tests.emulator.common import compress, compressor_case, halved, int32, ops, sums
from tests.oracles import compressor as oracle
from tests.oracles import rope

FREQUENCIES = rope.frequencies(10000.0, 64)


def turned(case: dict[str, Any]) -> dict[str, Any]:
    """The case with true angles: result row j of request b turns by the first token of its window."""
    ratio, row = case["cmp_ratio"], 0
    lengths = case["cu_seqlens"].diff() if case["seqused"] is None else case["seqused"]
    cos, sin = torch.ones_like(case["rope_cos"]), torch.zeros_like(case["rope_sin"])
    for start, length in zip(case["start_pos"].tolist(), lengths.tolist(), strict=True):
        for window in range(start // ratio, (start + length) // ratio):
            table = [rope.cos_sin(ratio * window, frequency) for frequency in FREQUENCIES]
            cos[row], sin[row] = (torch.tensor(half).repeat_interleave(2) for half in zip(*table, strict=True))
            row += 1
    return {**case, "rope_cos": cos, "rope_sin": sin}


def expected(case: dict[str, Any], rows: slice) -> torch.Tensor:
    """float64 entries of one request from its first token on."""
    x, wkv, wgate, ape, norm = (case[name].double().numpy() for name in ("x", "wkv", "wgate", "ape", "norm_weight"))
    ratio, overlap = case["cmp_ratio"], case["coff"] == 2
    return torch.tensor(
        np.array(oracle.entries(x[rows], wkv, wgate, ape, norm, ratio, overlap, 1e-6, FREQUENCIES)).reshape(
            -1, len(norm)
        )
    )


@pytest.mark.parametrize(("ratio", "lengths", "d"), [(4, [13, 3, 4], 128), (4, [9], 512), (128, [130, 5], 512)])
def test_numbers(ratio: int, lengths: list[int], d: int) -> None:
    """Float32 inside, rounded once; rows that no window fills are NaN."""
    case = turned(compressor_case(ratio, lengths, [0] * len(lengths), d=d))
    ends = np.cumsum([0, *lengths])
    want = torch.cat([expected(case, slice(a, b)) for a, b in pairwise(ends)])
    got = compress(case)
    assert len(got) == min(sum(lengths), sum(lengths) // ratio + len(lengths))
    assert_within_budget(got[: len(want)], want, want.bfloat16())
    assert got[len(want) :].isnan().all()


@pytest.mark.parametrize(
    ("ratio", "cuts"), [(4, (3, 4, 5, 12, 13, 17)), (4, (1, 2, 3, 9)), (128, (127, 128, 131)), (128, (60, 260))]
)
def test_chunks_do_not_matter(ratio: int, cuts: tuple[int, ...]) -> None:
    """Tokens cut anywhere, also within a window, give the same entries; the state carries the rest."""
    whole = turned(compressor_case(ratio, [cuts[-1]], [0]))
    want = compress({**whole, "state_cache": whole["state_cache"].clone()})[: cuts[-1] // ratio]
    got = []
    for start, end in zip((0, *cuts[:-1]), cuts, strict=True):
        step = {**whole, "x": whole["x"][start:end], "cu_seqlens": int32(0, end - start), "start_pos": int32(start)}
        rows = min(end - start, (end - start) // ratio + 1)
        step |= {name: torch.zeros(rows, 64) for name in ("rope_cos", "rope_sin")}
        got.append(compress(turned(step))[: end // ratio - start // ratio])
    assert torch.allclose(torch.cat(got).float(), want.float(), atol=0.05)
    plain = torch.cat(got).float()
    assert ((plain - want.float()).norm() / want.float().norm()) < 1e-3


def test_the_state_holds_every_token_of_the_call_and_nothing_else() -> None:
    case = compressor_case(4, [5, 2], [3, 0])
    before, state = case["state_cache"].clone(), case["state_cache"]
    compress(case)
    kv = case["x"].float() @ case["wkv"].float().T
    score = case["x"].float() @ case["wgate"].float().T
    for row, (request, position) in enumerate([(0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (1, 0), (1, 1)]):
        block, place = int(case["state_block_table"][request, position // 8]), position % 8
        want = torch.cat([kv[row], score[row] + case["ape"][position % 4]])
        assert torch.allclose(state[block, place], want, atol=1e-4)
        before[block, place] = state[block, place]
    assert_same(state, before)


def test_block_0_is_not_written_and_its_reads_take_what_is_there() -> None:
    case = compressor_case(4, [6], [2])
    case["state_block_table"][0, 0] = 0
    before = case["state_cache"].clone()
    got = compress(case)
    assert_same(case["state_cache"], before)
    assert not got[0].isnan().any()
    case["state_cache"][0, 0] = torch.nan  # row of position 0
    assert compress(case)[0].isnan().any()


@pytest.mark.parametrize("ratio", [4, 128])
def test_used_lengths(ratio: int) -> None:
    """seqused cuts a request; None means its whole length; 0 leaves a request out, whatever its table says."""
    case = compressor_case(ratio, [ratio + 2, 2 * ratio], [0, ratio - 1])
    case["state_block_table"][1] = -1
    state = case["state_cache"].clone()
    used = {"seqused": int32(ratio, 0), "state_cache": state}
    got = compress(case, **used)
    assert (~got.isnan()).any(1).tolist() == [True, *[False] * (len(got) - 1)]
    case = compressor_case(ratio, [ratio + 2], [0])
    same = compress(case, seqused=int32(ratio + 2), state_cache=case["state_cache"].clone())
    assert_same(compress(case), same)


def test_no_tokens_and_no_lengths() -> None:
    case = compressor_case(4, [0, 0], [5, 0], padding=3)
    case["state_block_table"][:] = -1
    assert compress(case).isnan().all()
    case = compressor_case(4, [0], [0])
    assert compress(case).shape == (0, 128)


def test_padded_rows_of_requests() -> None:
    """[B, S, hidden]: each request's entries stand in rows of its own."""
    case = compressor_case(4, [8, 8], [0, 3])
    packed = compress(case, state_cache=case["state_cache"].clone())  # 2 rows, then 2 rows
    padded = {**case, "x": case["x"].reshape(2, 8, -1), "cu_seqlens": None}
    padded |= {name: case[name][:4].reshape(2, 2, 64) for name in ("rope_cos", "rope_sin")}
    assert_same(compress(padded).reshape(4, 128), packed[:4])


def test_both_forms_agree() -> None:
    case = compressor_case(4, [6, 3], [5, 0])
    older = halved(case)
    want = compress(case)
    remove()
    install(compressor="two_state")
    try:
        got, *rest = ops().compressor(**older)
        assert_same(got, want)
        assert [tensor.numel() for tensor in rest] == [0] * 4
        assert_same(torch.cat([older["kv_state"], older["score_state"]], dim=-1), case["state_cache"])
        with pytest.raises(OperatorError, match="enable_grad must be one of False"):
            ops().compressor(**{**older, "enable_grad": True})
        with pytest.raises(
            OutOfRangeError, match="score_state, request 0, position 0: score_block_table names block -1"
        ):
            ops().compressor(**{**older, "score_block_table": torch.full_like(older["score_block_table"], -1)})
    finally:
        remove()
        install()


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("cache_mode must be one of 1, got 2", {"cache_mode": 2}),
        ("rope_head_dim must be one of 64", {"rope_head_dim": 32}),
        ("cmp_ratio must be one of", {"cmp_ratio": 3}),
        ("coff must be one of 1, 2", {"coff": 3}),
        ("rotary_mode must be one of 1, 2", {"rotary_mode": 0}),
        ("state_block_table must be given", {"state_block_table": None}),
        ("cu_seqlens must be given", {"cu_seqlens": None}),
        ("cu_seqlens must start at 0", {"cu_seqlens": int32(5, 9)}),  # lengths where prefix sums are due
        (r"state_block_table must have shape \[1, columns\]", {"state_block_table": torch.zeros(2, 3).int()}),
        ("start_pos must have shape", {"start_pos": int32(0, 0)}),
        ("seqused must have shape", {"seqused": int32(0, 0)}),
        ("x hidden must be a multiple of 512 in 1024..10240, got 512", {"x": torch.zeros(9, 512).bfloat16()}),
        ("x must have dtype", {"x": torch.zeros(9, 1024)}),
        ("wkv must have shape", {"wkv": torch.zeros(128, 1024).bfloat16()}),
        ("wgate must have dtype", {"wgate": torch.zeros(256, 1024)}),
        ("ape must have shape", {"ape": torch.zeros(4, 128)}),
        ("norm_weight must have dtype torch.bfloat16", {"norm_weight": torch.zeros(128)}),
        ("state_cache must have shape", {"state_cache": torch.zeros(4, 8, 256)}),
        ("state_cache must have dtype torch.float32", {"state_cache": torch.zeros(4, 8, 512).bfloat16()}),
        (r"rope_cos must have shape \[3, 64\]", {"rope_cos": torch.zeros(9, 64)}),  # one row a result row, not a token
        ("rope_sin must have dtype", {"rope_sin": torch.zeros(3, 64).half()}),
    ],
)
def test_a_bad_argument_is_refused(pattern: str, changes: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match=pattern):
        compress(compressor_case(4, [9], [0]), **changes)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("x, request 0, position 9: cu_seqlens ends at 10, but x has 9 rows", {"cu_seqlens": int32(0, 10)}),
        ("x, request 0, position 9: seqused passes its 9 rows", {"seqused": int32(10)}),
        ("start_pos, request 0, position -1: a negative position", {"start_pos": int32(-1)}),
        ("state_cache, request 0, position 24: needs column 3 of state_block_table", {"start_pos": int32(16)}),
    ],
)
def test_out_of_range(pattern: str, changes: dict[str, Any]) -> None:
    case = compressor_case(4, [9], [0])
    before = case["state_cache"].clone()
    case["state_block_table"] = case["state_block_table"].clamp(min=1)
    with pytest.raises(OutOfRangeError, match=pattern):
        compress(case, **changes)
    assert_same(case["state_cache"], before)


@pytest.mark.parametrize("block", [-1, 50])
@pytest.mark.parametrize(("start", "position"), [(4, 4), (9, 4)])  # a write; a read of the window before
def test_a_state_block_outside_of_the_cache(block: int, start: int, position: int) -> None:
    case = compressor_case(4, [4], [start])
    case["state_block_table"][0, 0] = block
    before = case["state_cache"].clone()
    with pytest.raises(
        OutOfRangeError, match=rf"state_cache, request 0, position \d+: .*names block {block}"
    ) as caught:
        compress(case)
    assert caught.value.position in (0, position)
    assert_same(case["state_cache"], before)


def test_slots_that_two_positions_share_are_refused() -> None:
    case = compressor_case(4, [9], [7])
    case["state_block_table"][0] = 1  # one block for all
    with pytest.raises(OperatorError, match="a slot is written twice, or read and written"):
        compress(case)
    case = compressor_case(4, [5], [8])
    case["state_block_table"][0, :2] = 1  # position 12 falls on position 4, which the window at 8 pools from
    with pytest.raises(OperatorError, match="a slot is written twice, or read and written"):
        compress(case)


@pytest.mark.parametrize(
    ("ratio", "coff", "d", "mode"), [(2, 2, 128, 2), (8, 1, 512, 2), (4, 1, 128, 2), (4, 2, 128, 1)]
)
def test_what_the_host_lets_through_undocumented_is_undefined(ratio: int, coff: int, d: int, mode: int) -> None:
    case = compressor_case(4, [9], [0])
    case |= {"cmp_ratio": ratio, "coff": coff, "rotary_mode": mode, "norm_weight": torch.ones(d).bfloat16()}
    case |= {name: torch.ones(coff * d, 1024).bfloat16() for name in ("wkv", "wgate")}
    case |= {"ape": torch.zeros(ratio, coff * d), "state_cache": torch.zeros(5, 8, 2 * coff * d)}
    rows = min(9, 9 // ratio + 1)
    case |= {name: torch.zeros(rows, 64) for name in ("rope_cos", "rope_sin")}
    assert compress(case).isnan().all()
    assert case["state_cache"].isnan().any()


def rows_and_slots(**changes: Any) -> tuple[torch.Tensor, ...]:
    """A call of compressor_metadata: tables where row p holds p."""
    table = torch.arange(64.0)[:, None].expand(64, 64).contiguous()
    given = {
        "rope_cos": table,
        "rope_sin": -table,
        "cu_seqlens": sums([9, 0, 6]),
        "start_pos": int32(3, 5, 30),
        "kv_block_table": torch.tensor([[5, 2], [1, 1], [9, 7]], dtype=torch.int32),
        "kv_block_size": 4,
        "slot_mapping_format": 1,
        "compress_ratio": 4,
        "num_compressed_tokens": 6,
        "num_reqs_actual": 3,
    }
    return ops().compressor_metadata(**{**given, **changes})


def test_entry_rows_and_slots() -> None:
    """Entries 0..2 of request 0, 7 and 8 of request 2, whose table ends at 7; then padding."""
    cos, sin, slots = rows_and_slots()
    assert (cos.shape, sin.shape) == ((6, 1, 1, 64), (6, 1, 1, 64))
    assert cos[:, 0, 0, 0].tolist() == [0, 4, 8, 28, 1, 1]
    assert sin[:, 0, 0, 9].tolist() == [0, -4, -8, -28, 0, 0]
    assert slots.tolist() == [20, 21, 22, 31, -1, -1]
    pairs = rows_and_slots(slot_mapping_format=2)[2]
    assert pairs.tolist() == [[5, 0], [5, 1], [5, 2], [7, 3], [-1, 3], [-1, 3]]


def test_missing_blocks_padded_requests_and_short_tables_give_no_slot() -> None:
    assert rows_and_slots(kv_block_table=torch.full((3, 2), -1).int())[2].tolist() == [-1] * 6
    assert rows_and_slots(start_pos=int32(-1, 5, 30))[2].tolist() == [31, -1, -1, -1, -1, -1]
    assert rows_and_slots(num_reqs_actual=1)[2].tolist() == [20, 21, 22, -1, -1, -1]
    short = torch.ones(8, 64)
    cos, _, slots = rows_and_slots(rope_cos=short * 3, rope_sin=short)
    assert slots.tolist() == [20, 21, -1, -1, -1, -1]
    assert cos[:, 0, 0, 0].tolist() == [3, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["num_compressed_tokens", "num_reqs_actual"])
def test_compressor_metadata_refuses_nothing_to_do(name: str) -> None:
    with pytest.raises(OperatorError, match=f"{name} must be >= 1, got 0"):
        rows_and_slots(**{name: 0})


def test_compressor_metadata_refuses_more_requests_than_there_are() -> None:
    with pytest.raises(OutOfRangeError, match="it holds 3 requests"):
        rows_and_slots(num_reqs_actual=4)
    with pytest.raises(OperatorError, match="slot_mapping_format must be one of 1, 2"):
        rows_and_slots(slot_mapping_format=0)
