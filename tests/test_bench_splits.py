"""How evenly splits share V3.2's work: counted from plans, derived on paper, and printed as counted.

The derivations for V4's layers are in `tests/test_counted.py`. What the derivation of `mla_work_of_ranks` says is exact
for tokens that 2 x ranks divide.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from dsacp_npu import distributed
from dsacp_npu.__main__ import main
from dsacp_npu.commands import bench_splits
from dsacp_npu.commands.bench_splits import LENGTHS, RANKS, SPLITS, Counted, drawn_evenly, evenness, full_steps
from dsacp_npu.commands.counted import (
    Received,
    Work,
    imbalance,
    mla_received_bytes,
    mla_work_of_ranks,
    work_of_ranks,
)
from dsacp_npu.commands.parity_trace import Request, Share
from dsacp_ref.config import v4_flash
from dsacp_ref.mla_config import v32
from dsacp_ref.spec import ContractError
from tests.oracles.splits import owned_tokens

V32, TOP = v32(), 2048
HEADER = "arrival_ms,input_tokens,cached_prefix_tokens,output_tokens"

each_length = pytest.mark.parametrize("tokens", LENGTHS)
each_size = pytest.mark.parametrize("cp_size", RANKS)


@lru_cache
def work(tokens: int, cp_size: int, split: str) -> Work:
    """The work of one prompt without a prefix."""
    lengths = torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int()
    return mla_work_of_ranks(*lengths, cp_size, V32, split=split)


def keys(*args: Any) -> float:
    """The busiest rank's attended latents over the mean."""
    return imbalance(work(*args).keys)


def scores(*args: Any) -> float:
    """The busiest rank's index scores over the mean."""
    return imbalance(work(*args).scores)


def exactly(value: float) -> Any:
    """But for the rounding of a division."""
    return pytest.approx(value, rel=1e-12)


def one_percent(value: float) -> Any:
    """Within 1 % of it."""
    return pytest.approx(value, rel=0.01)


# --- what is counted ---


@pytest.mark.parametrize("split", ["contiguous", "zigzag", "zigzag_padded", "round_robin", "round_robin_page(2)"])
def test_work_is_that_of_counting_query_by_query(split: str) -> None:
    """Two requests, one of them behind cached tokens and on both sides of top-k, over three ranks; pads count for 0."""
    new, computed = [7, 530], [0, 1800]
    loc = torch.tensor([0, 7, 537]).int()
    got = mla_work_of_ranks(loc, torch.tensor([7, 2330]).int(), 3, V32, split=split)
    positions = [before + offset for count, before in zip(new, computed, strict=True) for offset in range(count)]
    want = Work([], [])
    for tokens in owned_tokens(new, 3, split):
        visible = [positions[token] + 1 for token in tokens if token >= 0]
        want.keys.append(sum(min(count, TOP) for count in visible))
        want.scores.append(sum(visible))
    assert got == want


def test_a_rank_without_tokens_has_nothing_to_do() -> None:
    assert work(2, 4, "contiguous") == Work([1, 2, 0, 0], [1, 2, 0, 0])


@each_length
@pytest.mark.parametrize("split", [*SPLITS, "round_robin_page(128)"])
def test_all_ranks_together_do_what_one_device_does(tokens: int, split: str) -> None:
    """Every query scores all it may see, and attends to K of it but for the first K - 1 queries."""
    assert sum(work(tokens, 8, split).keys) == tokens * TOP - TOP * (TOP - 1) // 2
    assert sum(work(tokens, 8, split).scores) == tokens * (tokens + 1) // 2


# --- balance ---


@each_length
@each_size
def test_balance_of_index_scores(tokens: int, cp_size: int) -> None:
    """Nearly twice the mean for the last contiguous share; exactly even by zigzag."""
    assert scores(tokens, cp_size, "contiguous") == one_percent(2 - 1 / cp_size)
    assert len(set(work(tokens, cp_size, "zigzag").scores)) == 1
    assert scores(tokens, cp_size, "round_robin") == exactly(1 + (cp_size - 1) / (tokens + 1)) == one_percent(1)
    assert scores(tokens, cp_size, "round_robin_page(128)") == one_percent(1 + (cp_size - 1) * 128 / tokens)


@each_length
@each_size
def test_balance_of_chosen_tokens(tokens: int, cp_size: int) -> None:
    """Contiguous: the last rank attends to K everywhere. Zigzag: so does its first block, so nothing is gained."""
    uneven = TOP / (TOP - TOP * (TOP - 1) / (2 * tokens))
    assert keys(tokens, cp_size, "contiguous") == exactly(uneven)
    assert keys(tokens, cp_size, "zigzag") == exactly(uneven)
    assert keys(tokens, cp_size, "round_robin") == one_percent(1)
    assert 1 < keys(tokens, cp_size, "round_robin_page(128)") < 1 + (cp_size - 1) * 128 / tokens


@pytest.mark.parametrize("tokens", [4096, 4352, 5120])
@each_size
def test_balance_of_chosen_tokens_of_a_prompt_that_is_short_against_top_k(tokens: int, cp_size: int) -> None:
    """The first block of zigzag's last rank reaches back to queries that see fewer than K tokens: it helps."""
    block = tokens // (2 * cp_size)
    misses = [max(TOP - 1 - position, 0) for position in range((cp_size - 1) * block, cp_size * block)]
    most = max(TOP - 1 - (cp_size - 1) * block, 0)
    some = min(most, block)
    assert sum(misses) == some * most - some * (some - 1) // 2
    mean = TOP - TOP * (TOP - 1) / (2 * tokens)
    assert keys(tokens, cp_size, "contiguous") == exactly(TOP / mean)
    assert keys(tokens, cp_size, "zigzag") == exactly((TOP - sum(misses) / (2 * block)) / mean)


@each_length
@each_size
def test_balance_of_v4_in_the_table(tokens: int, cp_size: int) -> None:
    """The same derived figures as for V3.2's table: windows, chosen entries, all entries, index scores."""
    figures = {key: found[0] for key, found in evenness([bench_splits.one_request(tokens)]).items()}

    def found(ratio: int, work: str, split: str) -> float:
        return figures[Counted(f"V4-Flash, ratio {ratio}, {work}", split, cp_size)]

    top, last = v4_flash().index_topk, 128 + tokens / 128 * (1 - 1 / (2 * cp_size))
    for split in ("contiguous", "zigzag"):
        assert found(1, "attention", split) == one_percent(1 / (1 - 64 / tokens))
        assert found(4, "attention", split) == one_percent((128 + top) / (128 + top - 2 * top**2 / tokens))
    assert found(4, "indexer", "contiguous") == one_percent(2 - 1 / cp_size)
    assert found(4, "indexer", "zigzag") == exactly(1)
    assert found(128, "attention", "contiguous") == one_percent(last / (128 + tokens / 256))
    assert found(128, "attention", "zigzag") == one_percent(1)
    assert all(found(ratio, "attention", "round_robin") == one_percent(1) for ratio in (1, 4, 128))
    assert found(4, "indexer", "round_robin") == one_percent(1)


# --- bytes ---

HIDDEN, BF16 = V32.hidden_size, 2

each_shape = pytest.mark.parametrize("tokens, ranks", [(8192, 2), (8192, 8), (131072, 8)])
each_split = pytest.mark.parametrize("split", SPLITS)


def calls(lengths: list[int], cp_size: int, cp_rank: int, split: str, **options: Any) -> list[Received]:
    """What a rank receives in one layer and at the end, bfloat16, experts whole unless said."""
    loc = torch.tensor([0, *lengths]).cumsum(0).int()
    options = {"experts": "whole", "dtype": torch.bfloat16, **options}
    return mla_received_bytes(loc, cp_size, cp_rank, V32, split=split, **options)


@each_shape
@each_split
@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_of_keys(tokens: int, ranks: int, split: str, fp8: bool) -> None:
    """Latents, rope keys and index keys of others' rows, as the caches hold them: FP8 brings its scales."""
    a_token = 656 + 128 + 4 if fp8 else (512 + 64 + 128) * BF16
    for rank in (0, ranks - 1):
        [keys, _] = calls([tokens], ranks, rank, split, fp8=fp8)
        assert keys == ("all_gather", one_percent((ranks - 1) / ranks * tokens * a_token))


@each_shape
@each_split
def test_bytes_of_experts(tokens: int, ranks: int, split: str) -> None:
    """Whole experts work on own rows. Shared ones take all rows, and give summands of own rows, or of all."""
    rows = (ranks - 1) / ranks * tokens * HIDDEN * BF16
    want = {
        "whole": [],
        "split": [("all_gather", one_percent(rows)), ("reduce_scatter", one_percent(rows))],
        "sliced": [("all_gather", one_percent(rows)), ("all_reduce", one_percent(2 * rows))],
    }
    for experts, shared in want.items():
        for rank in (0, ranks - 1):
            _, *found, _ = calls([tokens], ranks, rank, split, experts=experts)
            assert found == shared


@each_size
def test_bytes_of_last_rows(cp_size: int) -> None:
    """Each rank brings as many rows as the one that has most: its share where last rows are spread, else all.

    By zigzag the first rank has them all: it has every request's last block.
    """

    def last_rows(lengths: list[int], split: str) -> int:
        [_, last] = calls(lengths, cp_size, cp_size // 2, split)
        assert last.name == "all_gather"
        return last.num_bytes

    row, others = HIDDEN * BF16, (cp_size - 1) / cp_size
    lengths = [129] * 32  # by round robin, the next request's last token is the next rank's
    assert last_rows(lengths, "round_robin") == one_percent(others * 32 * row)
    assert last_rows(lengths, "contiguous") == one_percent(others * 32 * row)
    assert last_rows(lengths, "zigzag") == (cp_size - 1) * 32 * row
    assert last_rows([4096], "round_robin") == (cp_size - 1) * row


@pytest.mark.parametrize("split, most", [("contiguous", 1999), ("round_robin", 1999), ("zigzag", 999 + 1001)])
def test_rows_travel_padded_to_the_largest_count(split: str, most: int) -> None:
    """7994 tokens over 4 ranks. By zigzag the first rank has the first block of both requests, which are one longer."""
    [keys, _] = calls([3993, 4001], 4, 1, split)
    assert keys.num_bytes == 3 * most * (512 + 64 + 128) * BF16


def test_no_bytes_are_counted_for_experts_that_ranks_cannot_share() -> None:
    with pytest.raises(ContractError, match=r"^experts must be one of"):
        calls([64], 2, 0, "zigzag", experts="halved")
    assert distributed.dist is torch.distributed


# --- batches of a trace ---


def test_prompts_fill_steps_in_order_and_go_on_behind_what_was_computed() -> None:
    requests = [Request(35, 20, 5), Request(25, 0, 5), Request(9, 8, 5)]
    first, second, third = full_steps(requests, 16)
    assert first.shares == (Share(0, 20, 15), Share(1, 0, 1))
    assert second.shares == (Share(1, 1, 16),)
    assert third.shares == (Share(1, 17, 8), Share(2, 8, 1))
    loc, lens = bench_splits.batch_of(third)
    assert (loc.tolist(), lens.tolist()) == ([0, 8, 9], [25, 9])
    assert full_steps(requests[:1], 5) == full_steps(requests, 5)[:3]  # no empty step behind a full one


@pytest.mark.parametrize("most, places", [(1, [0]), (2, [0, 3]), (3, [0, 2, 4]), (4, [0, 2, 4]), (5, [0, 1, 2, 3, 4])])
def test_steps_are_drawn_from_all_over_the_trace(most: int, places: list[int]) -> None:
    steps = full_steps([Request(10, 0, 1)], 2)
    assert drawn_evenly(steps, most) == [steps[place] for place in places]


# --- the table ---


def printed(text: str) -> dict[str, dict[Counted, str]]:
    """The figures of every table of evenness, by its title."""
    tables: dict[str, dict[Counted, str]] = {}
    columns = [(split, cp_size) for split in SPLITS for cp_size in RANKS]
    for paragraph in text.split("\n\n")[2:]:
        title, *head, body = [*paragraph.splitlines()[:3], paragraph.splitlines()[3:]]
        assert [line.split() for line in head] == [list(SPLITS), ["ranks", *map(str, RANKS * len(SPLITS))]]
        assert len({len(line) for line in [*head, *body]}) == 1
        tables[title.strip()] = {
            Counted(line[:35].strip(), *column): figure
            for line in body
            for column, figure in zip(columns, line[35:].split(), strict=True)
        }
    return tables


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Five prompts of 3100 new tokens in all, two of them behind a long prefix."""
    file = tmp_path / "trace.csv"
    rows = ["0,3000,2500,10", "5,2000,0,10", "9,4900,4400,10", "12,90,0,10", "13,10,0,10"]
    file.write_text("\n".join([HEADER, *rows]) + "\n")
    return str(file)


def test_the_table_holds_what_was_counted(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request at one length; of the trace the middle and the largest figure of three batches."""
    monkeypatch.setattr(bench_splits, "LENGTHS", (8192,))
    monkeypatch.setattr(bench_splits, "TOKEN_BUDGET", 1200)
    monkeypatch.setattr(bench_splits, "traffic", lambda: None)
    assert main(["bench", "--only", "splits", "--trace", trace]) == 0
    tables = printed(capsys.readouterr().out)
    assert list(tables) == [
        "one request of 8192 tokens, no prefix",
        "median of 3 batches from 3 in the trace, 1200 new tokens each behind prefixes",
        "worst of them, each figure's own",
    ]
    alone, middle, worst = tables.values()
    batches = [([0, 500, 1200], [3000, 700]), ([0, 1200], [1900]), ([0, 100, 600, 690, 700], [2000, 4900, 90, 10])]
    works = {
        "V3.2, indexer": lambda *args, **options: mla_work_of_ranks(*args, V32, **options).scores,
        "V3.2, attention": lambda *args, **options: mla_work_of_ranks(*args, V32, **options).keys,
        "V4-Flash, ratio 4, indexer": lambda *args, **options: (
            work_of_ranks(*args, v4_flash(), compress_ratio=4, **options).scores
        ),
    }
    for ratio in (1, 4, 128):
        works[f"V4-Flash, ratio {ratio}, attention"] = lambda *args, ratio=ratio, **options: (
            work_of_ranks(*args, v4_flash(), compress_ratio=ratio, **options).keys
        )
    assert {counted.work for counted in alone} == set(works)
    for counted in alone:
        name, split, cp_size = counted
        [one, *found] = [
            imbalance(works[name](torch.tensor(loc).int(), torch.tensor(lens).int(), cp_size, split=split))
            for loc, lens in [([0, 8192], [8192]), *batches]
        ]
        assert alone[counted] == f"{one:.3f}"
        assert middle[counted] == f"{median(found):.3f}"
        assert worst[counted] == f"{max(found):.3f}"


def test_the_table_of_bytes_holds_the_derived_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_splits, "LENGTHS", (8192, 1024))
    bench_splits.traffic()
    title, head, ranks, *body = capsys.readouterr().out.strip().splitlines()
    assert title.startswith("MB that a rank receives in a V3.2 layer")
    assert (head.split(), ranks.split()) == (["tokens", "8192", "1024"], ["ranks", *"248248"])
    assert len({len(line) for line in (head, ranks, *body)}) == 1
    columns = [(tokens, cp_size) for tokens in (8192, 1024) for cp_size in RANKS]

    def figures(bytes_a_token: int) -> list[str]:
        return [f"{(cp_size - 1) / cp_size * tokens * bytes_a_token / 1e6:.1f}" for tokens, cp_size in columns]

    assert {line[:35].strip(): line[35:].split() for line in body} == {
        "keys": figures(704 * BF16),
        "keys, FP8 caches": figures(788),
        "experts, whole": figures(0),
        "experts, split": figures(2 * HIDDEN * BF16),
        "experts, sliced": figures(3 * HIDDEN * BF16),
        "last row": [f"{(cp_size - 1) * HIDDEN * BF16 / 1e6:.1f}" for _, cp_size in columns],
    }


def test_a_figure_of_nothing_is_even() -> None:
    """A prompt too short for one entry has no index scores to share."""
    figures = evenness([bench_splits.one_request(3)])
    assert figures[Counted("V4-Flash, ratio 4, indexer", "zigzag", 2)] == [1.0]


def test_without_a_trace_only_long_requests_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_splits, "LENGTHS", (256, 512))
    monkeypatch.setattr(bench_splits, "traffic", lambda: print("bytes"))
    assert main("bench --only splits".split()) == 0
    text = capsys.readouterr().out.removesuffix("bytes\n")
    assert [title.split()[3] for title in printed(text)] == ["256", "512"]


@pytest.mark.parametrize(
    "words, wrong",
    [
        ("--only core --trace nothing.csv", "--trace must be given with section splits, got sections core"),
        ("--only splits --trace nothing.csv", "no file or folder nothing.csv"),
        ("--only splits --device cuda", "--only with --device cuda must be one of"),
        ("--device cuda --trace nothing.csv", "--trace must be given with section splits, got sections attention"),
    ],
)
def test_what_cannot_be_counted_is_refused(words: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    assert wrong in capsys.readouterr().err
