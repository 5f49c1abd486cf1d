"""Faults of tables, choices, attention and collected rows: right dumps, damaged by plain loops, and the cause named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsacp_npu.validation.core import Finding
from tests import plain
from tests.layer_strategies import CSA, HCA, WINDOW, Cut, Kind
from tests.validate.dumps import recorded, report_of

Dump = dict[str, Any]
RANKS = Cut(2, "zigzag", "full", "gather_kv", "gather_weight")
ROBIN = Cut(3, "round_robin", "full", "gather_kv", "gather_weight", 2)
HEADS = Cut(2, "contiguous", "full", "replicate", "all_to_all", 3)
_made: dict[Any, list[Dump]] = {}


def right(kind: Kind = CSA, cut: Cut = RANKS, **more: Any) -> list[Dump]:
    """A right dump of every rank, to be damaged."""
    key = kind, cut, tuple(more.items())
    if key not in _made:
        _made[key] = recorded(kind=kind, cut=cut, **more)
    return deepcopy(_made[key])


def found(folder: Path, dumps: Sequence[Dump], **options: Any) -> list[Finding]:
    """What differs."""
    return list(report_of(folder, dumps, **options).findings)


def assert_named(findings: Sequence[Finding], check: str, *kinds: str) -> None:
    """Only this check differs, and these are the causes of each of its findings."""
    assert findings
    for finding in findings:
        assert finding.check == check, finding
        assert [cause.kind for cause in finding.causes] == list(kinds), finding


def own(dump: Dump) -> np.ndarray:
    """The local rows that are no pads."""
    return dump["token_indices"] >= 0


def requests(dump: Dump) -> np.ndarray:
    """The request of each own query, by counting."""
    loc = dump["query_start_loc"].tolist()
    return np.array([sum(start <= token for start in loc[1:]) for token in dump["token_indices"][own(dump)]])


# --- RoPE ---


def with_tables(dump: Dump, cos: np.ndarray, sin: np.ndarray) -> None:
    """Other tables in the dump."""
    dump["cos"], dump["sin"] = cos.astype(np.float32), sin.astype(np.float32)


def angles(dump: Dump, where: np.ndarray, theta: float = 90.0, *, yarn: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The definition's table of two pairs, worked out by hand: YaRN stretches the second pair by 4."""
    pairs = [1.0, theta**-0.5]
    if yarn:
        from tests.oracles import rope

        stretch = {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5, "original": 64}
        pairs = rope.frequencies(theta, 4, stretch)
    angle = np.float32(where)[:, None] * np.float32(pairs)
    return np.cos(angle.astype(float)), np.sin(angle.astype(float))


def bfloat16(values: np.ndarray) -> np.ndarray:
    """By way of torch."""
    import torch

    return torch.tensor(values).bfloat16().double().numpy()


ROPE: dict[str, tuple[Callable[[Dump], tuple[np.ndarray, np.ndarray]], str]] = {
    "A36": (lambda dump: (bfloat16(dump["cos"]), bfloat16(dump["sin"])), "table_in_16_bit"),
    "float16": (lambda dump: (np.float16(dump["cos"]), np.float16(dump["sin"])), "table_in_16_bit"),
    "plain": (lambda dump: angles(dump, dump["positions"], yarn=False), "plain_frequencies"),
    "the window's": (lambda dump: angles(dump, dump["positions"], 50.0, yarn=False), "other_theta"),
    "flat": (lambda dump: angles(dump, dump["token_indices"]), "flat_tokens_as_positions"),
    "rows": (lambda dump: angles(dump, np.arange(len(dump["positions"]))), "rows_as_positions"),
    "negated": (lambda dump: (dump["cos"], -dump["sin"]), "sine_negated"),
    "swapped": (lambda dump: (dump["sin"], dump["cos"]), "cos_and_sin_swapped"),
    "halves": (lambda dump: (np.tile(dump["cos"], 2), np.tile(dump["sin"], 2)), "half_split_table"),
}


@pytest.mark.parametrize(("damage", "kind"), ROPE.values(), ids=ROPE)
def test_a_rope_table(tmp_path: Path, damage: Callable[[Dump], Any], kind: str) -> None:
    dumps = right()
    for dump in dumps:
        with_tables(dump, *damage(dump))
    assert_named(found(tmp_path, dumps), "rope", kind)


def test_a_window_only_layer_with_yarn(tmp_path: Path) -> None:
    dumps = right(WINDOW)
    for dump in dumps:
        with_tables(dump, *angles(dump, dump["positions"]))
    assert_named(found(tmp_path, dumps), "rope", "yarn_frequencies")


def test_columns_that_lie_twice_side_by_side_are_right(tmp_path: Path) -> None:
    """As vllm-ascend has them, with unit axes."""
    dumps = right()
    for dump in dumps:
        dump["cos"], dump["sin"] = (np.repeat(dump[name], 2, axis=1)[:, None, None] for name in ("cos", "sin"))
    assert not found(tmp_path, dumps)


def test_a_table_of_all_tokens_is_not_split(tmp_path: Path) -> None:
    dumps = right(CSA, HEADS)
    for dump in dumps:
        dump["cos"], dump["sin"] = dump["full_cos"], dump["full_sin"]
    findings = found(tmp_path, dumps[1:], cp_size=2)
    assert [cause.kind for cause in findings[0].causes] == ["not_split"]


def test_frequencies_of_another_rounding_are_a_note(tmp_path: Path) -> None:
    dumps = right()
    for dump in dumps:
        cos, sin = angles(dump, dump["positions"] * (1 + 2e-7))
        with_tables(dump, cos, sin)
    report = report_of(tmp_path, dumps)
    assert not report.findings
    assert any("rounded in another way" in note for note in report.notes)


# --- choices ---


def scores(dump: Dump, *, relu: bool = True, signed: bool = True) -> list[np.ndarray]:
    """The scores of each own query with all entries of its request, by plain loops."""
    out = []
    size = dump["cmp_block_size"]
    for q, weights, request in zip(dump["index_q"], dump["index_weights"], requests(dump), strict=True):
        total = int(dump["seq_lens"][request]) // 4
        table = dump["cmp_block_table"][request]
        keys = np.array([dump["index_cache"][table[i // size], i % size] for i in range(total)]).reshape(total, -1)
        hits = q @ keys.T
        out.append((weights if signed else np.abs(weights)) @ (np.maximum(hits, 0) if relu else hits))
    return out


def choose(dump: Dump, count: Callable[[int], int], tables: list[np.ndarray] | None = None) -> np.ndarray:
    """The best entries of so many that a query at a position sees."""
    tables = scores(dump) if tables is None else tables
    width = dump["index_topk"]
    lists = np.full((len(tables), width), -1, np.int32)
    for row, (position, values) in enumerate(zip(dump["positions"][own(dump)], tables, strict=True)):
        seen = values[: count(int(position))]
        best = sorted(range(len(seen)), key=lambda i, seen=seen: (-seen[i], i))[:width]
        lists[row, : len(best)] = best
    return lists


def seen(position: int) -> int:
    """What a query sees."""
    return (position + 1) // 4


def entry_offsets(dump: Dump) -> np.ndarray:
    """Entries of requests before each own query's."""
    counts = [0, *np.cumsum(dump["seq_lens"] // 4).tolist()]
    return np.array([counts[request] for request in requests(dump)])[:, None]


def by_slot(dump: Dump) -> np.ndarray:
    """Slots of the right choice."""
    size, out = dump["cmp_block_size"], dump["topk_indices"].copy()
    for row, request in enumerate(requests(dump)):
        for lane, entry in enumerate(out[row]):
            if entry >= 0:
                out[row, lane] = dump["cmp_block_table"][request, entry // size] * size + entry % size
    return out


def shifted(dump: Dump, change: Any) -> np.ndarray:
    """Entries changed, -1 left alone."""
    chosen = dump["topk_indices"]
    return np.where(chosen >= 0, change, -1).astype(np.int32)


def filled(dump: Dump) -> np.ndarray:
    """0 in lanes behind the last entry: an entry that exists, and does not belong there."""
    return np.maximum(dump["topk_indices"], 0)


def doubled(dump: Dump) -> np.ndarray:
    """The best entry in both lanes."""
    chosen = dump["topk_indices"].copy()
    chosen[:, 1] = np.where(chosen[:, 1] >= 0, chosen[:, 0], -1)
    return chosen


def of_the_last(dump: Dump) -> np.ndarray:
    """Each request's last choice for all of its queries."""
    chosen, owners = dump["topk_indices"], requests(dump)
    return np.array([chosen[np.flatnonzero(owners == request)[-1]] for request in owners])


def global_seen(dump: Dump) -> np.ndarray:
    """The choice of queries that are aligned to the end of the whole request."""
    moved = deepcopy(dump)
    places = []
    loc = dump["cu_seqlens_q"]
    for row, request in enumerate(dump["request_indices"]):
        count = loc[row + 1] - loc[row]
        places += [dump["seq_lens"][request] - count + j for j in range(count)]
    moved["positions"][own(dump)] = places
    return choose(moved, seen)


def unrotated(dump: Dump) -> np.ndarray:
    """The choice by index queries that were not rotated: rotating is its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < dump["index_q"].shape[2]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    plain_q = dump["index_q"] @ matrix / np.sqrt(len(matrix))
    return choose(dump, seen, scores({**dump, "index_q": plain_q}))


CHOICES: dict[str, tuple[Callable[[Dump], np.ndarray], tuple[str, ...]]] = {
    "A23": (lambda dump: choose(dump, lambda position: position // 4 + 1), ("own_unfinished_entry",)),
    "A24": (lambda dump: choose(dump, lambda position: 10**6), ("future_entries",)),
    "A08": (global_seen, ("global_mask",)),
    "A09": (lambda dump: np.where(dump["topk_indices"] >= 0, 0, -1).astype(np.int32), ("collapsed",)),
    "packed": (lambda dump: shifted(dump, dump["topk_indices"] + entry_offsets(dump)), ("packed_entries",)),
    "slots": (by_slot, ("physical_slots",)),
    "tokens": (lambda dump: shifted(dump, dump["topk_indices"] * 4), ("entries_as_tokens",)),
    "A27": (filled, ("lanes_not_cleared",)),
    "twice": (doubled, ("entry_twice",)),
    "A30": (lambda dump: shifted(dump, dump["topk_indices"] + 10**6), ("garbage_entries",)),
    "A25": (of_the_last, ("choices_of_one_query",)),
    "no relu": (lambda dump: choose(dump, seen, scores(dump, relu=False)), ("relu_missing",)),
    "not rotated": (unrotated, ("query_not_rotated",)),
    "no sign": (lambda dump: choose(dump, seen, scores(dump, signed=False)), ("weights_unsigned",)),
    "worst": (lambda dump: choose(dump, seen, [-values for values in scores(dump)]), ("worst_chosen",)),
    "one short": (
        lambda dump: np.pad(dump["topk_indices"][:, :1], ((0, 0), (0, 1)), constant_values=-1),
        ("too_few_entries",),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice(tmp_path: Path, name: str) -> None:
    damage, kinds = CHOICES[name]
    # One query a row sees the same by the end of the request as without any mask.
    dumps = right(CSA, RANKS if name in ("A08", "A24") else ROBIN)
    for dump in dumps:
        for name in ("out", "lse"):  # of the right choice: another one is a finding of its own
            dump.pop(name)
        dump["topk_indices"] = damage(dump)
    assert_named(found(tmp_path, dumps), "selection", *kinds)


STRUCTURE = ("A23", "A24", "A09", "A27", "twice", "A30", "one short")


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_choice_that_no_scores_could_give(tmp_path: Path, name: str) -> None:
    """Without index queries and keys the form of a choice is checked, and its causes are named where the form tells."""
    dumps = right(CSA, ROBIN)
    for dump in dumps:
        chosen = CHOICES[name][0](dump)
        dump["topk_indices"] = chosen
        for gone in ("out", "lse", "index_q", "index_weights", "index_cache"):
            dump.pop(gone)
    for finding in found(tmp_path, dumps):
        assert finding.check == "selection"
        assert CHOICES[name][1][0] in [cause.kind for cause in finding.causes], finding


def test_places_of_a_choice_do_not_matter(tmp_path: Path) -> None:
    """Order is free; -1 in front is a note, because CANN's operators refuse it. Pad rows may be there or not."""
    dumps = right(CSA, ROBIN)
    for dump in dumps:
        dump["topk_indices"] = np.ascontiguousarray(dump["topk_indices"][:, ::-1])
        padded = np.full((len(dump["token_indices"]), dump["index_topk"]), 99, np.int32)
        padded[own(dump)] = dump["topk_indices"]
        dump["topk_indices"] = padded
    report = report_of(tmp_path, dumps)
    assert not report.findings
    assert any("-1 stands before entries" in note for note in report.notes)


def test_entries_of_one_score_may_be_swapped(tmp_path: Path) -> None:
    """vllm-project/vllm-ascend#15053: ties; which of them is chosen is a note."""
    dumps = right(CSA, RANKS)
    for dump in dumps:
        dump["index_weights"][:] = 0  # every score is 0
        dump["topk_indices"] = choose(dump, seen)
        last = np.array([max(seen(int(p)) - 1, 0) for p in dump["positions"][own(dump)]])
        ends = np.where(dump["topk_indices"] >= 0, np.stack([last, last - 1], axis=1), -1)
        dump["topk_indices"] = ends.astype(np.int32)
        for name in ("out", "lse"):
            dump.pop(name)
    report = report_of(tmp_path, dumps)
    assert not report.findings
    assert any("scores are as good" in note for note in report.notes)


# --- attention ---


def attended(
    dump: Dump,
    *,
    window: int = 5,
    entries: Callable[[int, int, np.ndarray], Sequence[int]] | None = None,
    scale: float | None = None,
    sink: Callable[[np.ndarray], np.ndarray] = lambda sink: sink,
    aligned: Callable[[Dump], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each own query by plain loops; ``entries`` says which ones from its position, request and choice."""
    outs, lses = [], []
    places = dump["positions"][own(dump)] if aligned is None else aligned(dump)
    lists = dump.get("topk_indices", np.zeros((len(places), 0), np.int32))
    for q, position, request, chosen in zip(dump["q"], places, requests(dump), lists, strict=True):
        raw = [
            (dump["swa_block_table"], dump["swa_cache"], i) for i in range(max(0, position - window + 1), position + 1)
        ]
        picked = chosen[chosen >= 0] if entries is None else entries(int(position), int(request), chosen)
        raw += [(dump["cmp_block_table"], dump["cmp_cache"], int(i)) for i in picked]
        rows = np.array([cache[table[request, i // cache.shape[1]], i % cache.shape[1]] for table, cache, i in raw])
        rows = rows.reshape(len(raw), q.shape[1])
        size = dump["softmax_scale"] if scale is None else scale
        out, lse = plain.attention(q, rows, sink(dump["attn_sink"]), size)
        outs.append(out)
        lses.append(lse)
    return np.array(outs), np.array(lses)


def all_seen(position: int, request: int, chosen: np.ndarray) -> range:
    """All entries that a query sees, at ratio 8."""
    return range((position + 1) // 8)


def last_for_none(dump: Dump) -> tuple[np.ndarray, np.ndarray]:
    """Lanes of -1 that read the last entry of the request."""
    return attended(dump, entries=lambda p, r, chosen: np.where(chosen < 0, dump["seq_lens"][r] // 4 - 1, chosen))


def end_aligned(dump: Dump) -> np.ndarray:
    """Where queries stand if each operator row ends with the request."""
    loc, places = dump["cu_seqlens_q"], []
    for row, request in enumerate(dump["request_indices"]):
        count = loc[row + 1] - loc[row]
        places += [dump["seq_lens"][request] - count + j for j in range(count)]
    return np.array(places)


def none(sink: np.ndarray) -> np.ndarray:
    """No sink."""
    return np.full_like(sink, -1e30)


ATTENTION: dict[str, tuple[Kind, Callable[[Dump], Any], str]] = {
    "no sink": (CSA, lambda dump: attended(dump, sink=none)[0], "sink_missing"),
    "A34": (CSA, lambda dump: attended(dump, sink=lambda sink: sink + np.log(2))[0], "sink_once_a_rank"),
    "scaled sink": (WINDOW, lambda dump: attended(dump, sink=lambda sink: sink * 6**-0.5)[0], "sink_scaled"),
    "127": (CSA, lambda dump: attended(dump, window=4)[0], "window_one_short"),
    "129": (WINDOW, lambda dump: attended(dump, window=6)[0], "window_one_long"),
    "no scale": (CSA, lambda dump: attended(dump, scale=1.0)[0], "scale_missing"),
    "A08": (WINDOW, lambda dump: attended(dump, aligned=end_aligned)[0], "global_mask"),
    "A08, entries": (HCA, lambda dump: attended(dump, aligned=end_aligned, entries=all_seen)[0], "global_mask"),
    "A27": (CSA, lambda dump: last_for_none(dump)[0], "no_entry_lanes_used"),
    "window alone": (CSA, lambda dump: attended(dump, entries=lambda *_: [])[0], "entries_missing"),
    "entries alone": (CSA, lambda dump: attended(dump, window=0)[0], "window_missing"),
    "all entries": (
        CSA,
        lambda dump: attended(dump, entries=lambda p, r, c: range((p + 1) // 4))[0],
        "selection_ignored",
    ),
    "future": (
        HCA,
        lambda dump: attended(dump, entries=lambda p, r, c: range(int(dump["seq_lens"][r]) // 8))[0],
        "future_entries",
    ),
}


@pytest.mark.parametrize(("kind", "damage", "cause"), ATTENTION.values(), ids=ATTENTION)
def test_attention(tmp_path: Path, kind: Kind, damage: Callable[[Dump], np.ndarray], cause: str) -> None:
    dumps = right(kind)
    for dump in dumps:
        dump["out"] = damage(dump)
    assert_named(found(tmp_path, dumps), "attention", cause)


def test_the_loops_of_this_file_are_right(tmp_path: Path) -> None:
    for kind, entries in ((WINDOW, None), (CSA, None), (HCA, all_seen)):
        dumps = right(kind)
        for dump in dumps:
            dump["out"], dump["lse"] = attended(dump, entries=entries)
        assert not found(tmp_path, dumps)


def test_an_own_unfinished_entry(tmp_path: Path) -> None:
    """tpu-inference#3536, in a layer that sees all entries: those that the step completes are there already."""
    dumps = right(HCA)
    for dump in dumps:
        total = dump["seq_lens"] // 8
        dump["out"] = attended(dump, entries=lambda p, r, c, total=total: range(min(p // 8 + 1, int(total[r]))))[0]
    assert_named(found(tmp_path, dumps), "attention", "own_unfinished_entry")


def test_rows_that_are_shifted_by_one(tmp_path: Path) -> None:
    dumps = right()
    for dump in dumps:
        dump["out"] = np.roll(dump["out"], 1, axis=0)
    assert_named(found(tmp_path, dumps), "attention", "rows_of_neighbours")


def test_nan_of_an_owner_without_keys(tmp_path: Path) -> None:
    """ROCm/ATOM#1832."""
    dumps = right()
    dumps[0]["out"][3:5] = np.nan
    findings = found(tmp_path, dumps)
    assert_named(findings, "attention", "nan_rows")
    assert findings[0].index == (3, 0, 0)


def test_rows_without_keys_are_zero(tmp_path: Path) -> None:
    dumps = right(WINDOW, idle=(4,))
    keyless = dumps[0]["lse"][:, 0] == -np.inf
    assert keyless.any()
    dumps[0]["out"][keyless] = 5.0
    dumps[0]["lse"][keyless] = 0.0
    assert_named(found(tmp_path, dumps), "attention", "rows_without_keys")


def test_lanes_past_their_length(tmp_path: Path) -> None:
    """flashinfer-ai/flashinfer#5095: valid entries behind topk_length must not count."""
    dumps = right()
    for dump in dumps:
        lanes = dump["topk_indices"]
        dump["topk_length"] = (lanes >= 0).sum(axis=1).astype(np.int32)
        dump["topk_indices"] = np.maximum(lanes, 0)
    assert not found(tmp_path, dumps)
    for dump in dumps:
        every = {
            **dump,
            "topk_indices": np.where(dump["seq_lens"][requests(dump)][:, None] >= 4, dump["topk_indices"], -1),
        }
        dump["out"] = attended(every)[0]
    assert_named(found(tmp_path, dumps), "attention", "lanes_past_length_used", "no_entry_lanes_used")


def test_turned_back_already(tmp_path: Path) -> None:
    dumps = right()
    for dump in dumps:
        cos, sin = (dump[name][own(dump)][:, None].astype(float) for name in ("cos", "sin"))
        a, b = dump["out"][..., -4::2].copy(), dump["out"][..., -3::2].copy()
        dump["out"][..., -4::2], dump["out"][..., -3::2] = a * cos + b * sin, b * cos - a * sin
    assert_named(found(tmp_path, dumps), "attention", "turned_back_already")


LSE: dict[str, tuple[Callable[[Dump], np.ndarray], str]] = {
    "base 2": (lambda dump: dump["lse"] / np.log(2), "lse_base_two"),
    "with sink": (lambda dump: np.logaddexp(dump["lse"], dump["attn_sink"]), "lse_with_sink"),
    "no scale": (lambda dump: attended(dump, scale=1.0)[1], "scale_missing"),
}


@pytest.mark.parametrize(("damage", "cause"), LSE.values(), ids=LSE)
def test_lse(tmp_path: Path, damage: Callable[[Dump], np.ndarray], cause: str) -> None:
    dumps = right()
    for dump in dumps:
        dump["lse"] = damage(dump)
    assert_named(found(tmp_path, dumps), "attention", cause)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_faults_show_in_short_floats(tmp_path: Path, dtype: str) -> None:
    dumps = right(WINDOW, RANKS, dtype=dtype)
    wide = right(WINDOW, RANKS, dtype=dtype)
    for dump in wide:
        for name in ("q", "swa_cache", "attn_sink"):
            dump[name] = dump[name].astype(np.float64)
    for dump, exact in zip(dumps, wide, strict=True):
        dump["out"] = attended(exact, window=4)[0].astype(np.float32)
    assert_named(found(tmp_path, dumps), "attention", "window_one_short")


# --- collected rows ---


def gathered(dumps: list[Dump], name: str) -> np.ndarray:
    """The ranks' rows end to end."""
    return np.concatenate([dump[name] for dump in dumps])


def to_length(rows: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Cut, or filled up with zeros."""
    return np.concatenate([rows, np.zeros((len(like), rows.shape[1]))])[: len(like)]


def test_rank_major_rows(tmp_path: Path) -> None:
    """xLLM-AI/xllm#1997: cutting pads is not enough."""
    dumps = right()
    for dump in dumps:
        dump["output"] = to_length(gathered(dumps, "local_output"), dump["output"])
    assert_named(found(tmp_path, dumps), "collected", "order_not_restored")


def test_pad_rows_left_in(tmp_path: Path) -> None:
    """sgl-project/sglang#19820."""
    padded = Cut(2, "zigzag_padded", "full", "gather_kv", "gather_weight")
    dumps = right(WINDOW, padded)
    real = gathered(dumps, "token_indices") >= 0
    assert not real.all()
    whole = gathered(dumps, "local_output")
    for dump in dumps:
        dump["output"] = whole
    assert_named(found(tmp_path, dumps), "collected", "pad_rows_kept")


@pytest.mark.parametrize("cut", [RANKS, HEADS], ids=["rows", "summands"])
def test_a_rank_that_did_not_come(tmp_path: Path, cut: Cut) -> None:
    dumps = right(CSA, cut)
    loc = dumps[0]["query_start_loc"][-1]
    name = "local_output" if cut is RANKS else "partial_output"
    order = np.concatenate([dump["token_indices"] for dump in dumps])
    output = np.zeros_like(dumps[0]["output"])
    rows = [np.concatenate([dumps[0][name], np.zeros_like(dumps[1][name])]), dumps[0][name]][cut is HEADS]
    for token, row in zip(order, rows, strict=True):
        if 0 <= token < loc:
            output[token] = row
    for dump in dumps:
        dump["output"] = output
    assert_named(found(tmp_path, dumps), "collected", "rank_missing")


def test_summands_of_different_tokens(tmp_path: Path) -> None:
    """xLLM-AI/xllm#2097: f0(a) + f1(b), where f0(a) + f1(a) and f0(b) + f1(b) are due."""
    cut = Cut(2, "contiguous", "scattered", "gather_kv", "all_to_all")
    dumps = right(WINDOW, cut)
    count = len(dumps[0]["token_indices"])
    wrong = dumps[0]["partial_output"][:count] + dumps[1]["partial_output"][count:]
    for dump in dumps:
        dump["output"] = wrong
    assert_named(found(tmp_path, dumps), "collected", "other_tokens_summed")


def test_ranks_in_another_order(tmp_path: Path) -> None:
    """sgl-project/sglang#24560: the group that gathers is not the one that splits."""
    dumps = right(WINDOW, Cut(2, "contiguous", "full", "gather_kv", "gather_weight"), lengths=(24, 12), computed=(4, 0))
    rows = np.concatenate([dumps[1]["local_output"], dumps[0]["local_output"]])
    for dump in dumps:
        dump["output"] = rows
    assert_named(found(tmp_path, dumps), "collected", "ranks_in_other_order")


def test_outputs_need_all_ranks(tmp_path: Path) -> None:
    report = report_of(tmp_path, right()[:1])
    skipped = {result.check: result.missing for result in report.results if result.status == "skipped"}
    assert skipped["collected"] == ("local_output of rank 1",)
