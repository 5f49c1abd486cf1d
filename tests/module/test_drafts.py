"""Draft layers: greedy decoding with drafts says what the target says alone, on one device and with processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu.caches import Caches
from dsacp_npu.drafts import (
    accepted_counts,
    draft_steps,
    handed_rows,
    kept_tokens,
    rows_everywhere,
    shifted_tokens,
)
from dsacp_npu.layer import draft_metadata
from dsacp_npu.parallel import parallel_of
from dsacp_npu.partition import partition_tokens
from dsacp_npu.rows import own_rows
from dsacp_npu.step import StepMetadata, step_metadata, tensors_in
from dsacp_ref.spec import ContractError, UnsupportedError
from tests.compare import assert_double, assert_same
from tests.distributed.pool import run
from tests.layer_strategies import WINDOW, world_of
from tests.layer_strategies import run as by_definition
from tests.module.draft_work import drafting
from tests.module.draft_worlds import Story, Toy, speak, toy_of
from tests.module.worlds import FOUR_GROUPS, caches_of, filled, layers_of, model_of

pytestmark = pytest.mark.xdist_group("processes")

NUM_NEW = 8
# Chunks of a prompt, verify steps, and both at once: "c" comes when the others speak already.
ARRIVALS = {"a": 0, "b": 0, "c": 3}
TOY = toy_of(0, {"a": 15, "b": 3, "c": 10})
ON = {"enable_dsa_cp": True}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@cache
def alone() -> Story:
    """The target without drafts, on one device."""
    return speak(TOY, ARRIVALS, num_new=NUM_NEW)


@cache
def on_one_device(num_drafts: int) -> Story:
    """With drafts, on one device."""
    return speak(TOY, ARRIVALS, num_drafts=num_drafts, num_new=NUM_NEW)


def said(story: Story) -> dict[str, list[int]]:
    """Prompts and as many new tokens as were asked for; the last verify step may have brought more."""
    return {name: story.tokens[name][: len(prompt) + NUM_NEW] for name, prompt in TOY.prompts.items()}


Book = Mapping[tuple[str, int], np.ndarray]


def assert_rows(ranks: list[Book], due: Book, name: str) -> None:
    """Every row on whichever rank it is; between them the ranks have all."""
    for rank, book in enumerate(ranks):
        common = sorted(book.keys() & due.keys())
        assert_double(np.stack([book[at] for at in common]), [due[at] for at in common], f"{name} of rank {rank}")
    assert set[Any]().union(*ranks) >= due.keys(), name


def up_to(book: Book, counts: Mapping[str, int]) -> Book:
    """The rows of the first tokens of each request."""
    return {at: row for at, row in book.items() if at[1] < counts[at[0]]}


# --- greedy decoding ---


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_drafts_never_change_what_is_said(num_drafts: int) -> None:
    story = on_one_device(num_drafts)
    assert said(story) == said(alone())
    # All rows that stay, among them those after a rollback, are those of a run that saw no draft.
    heard = {name: len(tokens) - 1 for name, tokens in said(alone()).items()}
    assert_rows([story.rows], up_to(alone().rows, heard), "target")


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_the_toy_rejects_drafts_at_every_place_and_behind_entries(num_drafts: int) -> None:
    """Otherwise the tests here would prove less than they say."""
    verified = on_one_device(num_drafts).verified
    assert {part.accepted for part in verified} == set(range(num_drafts + 1))
    for ratio in (4, 8):
        crossed = [
            part
            for part in verified
            if (part.start + 1 + num_drafts) // ratio > (part.start + 1 + part.accepted) // ratio
        ]
        assert crossed, f"no rejected draft closed an entry of ratio {ratio}"
        assert any((part.start + 1 + part.accepted) % ratio == 0 for part in verified if part.accepted < num_drafts)


def test_draft_rows_are_those_of_the_layer_by_definition() -> None:
    """Step 0: one whole run over what was handed in, as if nothing was ever drafted. Later steps: behind that run."""
    story = on_one_device(3)
    inputs = {name: rows_in_order(story.draft_inputs, name) for name in TOY.prompts}
    outputs = {name: rows_in_order(story.draft_rows, name) for name in TOY.prompts}
    for name, rows in inputs.items():
        assert_double(outputs[name], whole_run(TOY, rows), name)
    for chain in story.chains[::5]:
        due = whole_run(TOY, np.concatenate([inputs[chain.request][: chain.start], chain.inputs]))
        assert len(chain.outputs) == 2
        assert_double(chain.outputs, due[chain.start :], f"behind {chain.start} tokens of {chain.request}")


def rows_in_order(book: Book, request: str) -> np.ndarray:
    """A request's rows from its first one; none is missing."""
    mine = {position: row for (name, position), row in book.items() if name == request}
    return np.stack([mine[position] for position in range(len(mine))])


def whole_run(toy: Toy, x: np.ndarray) -> np.ndarray:
    """The draft's attention over a request at once, by the reference."""
    world = world_of(np.random.default_rng(0), [len(x)], config=toy.model.config, kind=WINDOW, weights=toy.draft, x=[x])
    return by_definition(world, [world.lengths]).outputs[0]


WAYS = [
    ("contiguous", "full", "replicate", "all_to_all"),
    ("contiguous", "scattered", "gather_hidden", "gather_weight"),
    ("zigzag", "full", "gather_kv", "replicated_weight"),
    ("zigzag", "scattered", "gather_compressed", "all_to_all"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "drafts"), [(2, (1, 2, 3, 3)), (4, (3, 3, 1, 2))])
def test_processes_say_what_one_device_says(size: int, drafts: tuple[int, ...]) -> None:
    names = ("prefill_cp_mode", "dsa_cp_rows", "dsa_cp_key_mode", "dsa_cp_output_mode")
    cases = [({**ON, **dict(zip(names, way, strict=True))}, k) for way, k in zip(WAYS, drafts, strict=True)]
    told = run(size, "tests.module.draft_work:spoken", [(TOY, ARRIVALS, NUM_NEW, cases)] * size, timeout=300)
    for (options, num_drafts), ranks in zip(cases, zip(*told, strict=True), strict=True):
        due = on_one_device(num_drafts)
        for story in ranks:
            assert said(story) == said(alone()), options
            # The tokens do not depend on the drafts, so these are compared by themselves.
            assert story.verified == due.verified, options
            for chain, same in zip(story.chains, due.chains, strict=True):
                assert_double(chain.outputs, same.outputs, f"{options} {chain.request} {chain.start}")
        for book in ("rows", "draft_inputs", "draft_rows"):
            assert_rows([getattr(story, book) for story in ranks], getattr(due, book), f"{options} {book}")
        splits = ranks[0].splits
        assert splits[0][:2] == (True, True), "the first chunks of prompts are split"
        assert splits[-1] == (False,) * (1 + num_drafts), "a verify step, and drafts, run by heads"
        assert not any(later for _, _, *steps in splits for later in steps), "later draft steps run by heads"
        assert splits[ARRIVALS["c"]][:2] == (True, True), "the late prompt is split, and with it the drafts of others"


# --- metadata of its own for each draft step ---


def test_all_steps_built_before_the_first_is_read() -> None:
    """vllm-ascend#10878: kv 10, 11, 12; and building one changes none before it."""
    layer, caches = drafting({}, None, {"a": 6})
    steps = draft_steps([layer], caches, {"a": 4}, 3)
    assert [step.batches[1].seq_lens.tolist() for step in steps] == [[10], [11], [12]]
    assert [step.batches[1].query_start_loc.tolist() for step in steps] == [[0, 4], [0, 1], [0, 1]]
    assert [step.positions.tolist() for step in steps] == [[6, 7, 8, 9], [10], [11]]
    before = [[tensor.clone() for tensor in tensors_of(step)] for step in steps]
    step_metadata([layer], caches, {"a": 7})
    draft_steps([layer], caches, {"a": 2}, 3)
    for mine, due in zip(steps, before, strict=True):
        assert_same(tensors_of(mine), due)


def test_no_two_draft_steps_share_a_tensor() -> None:
    layer, caches = drafting({}, None, {"a": 6, "b": 1})
    steps = draft_steps([layer], caches, {"a": 4, "b": 1}, 3)
    places = [{tensor.untyped_storage().data_ptr() for tensor in tensors_of(step) if tensor.numel()} for step in steps]
    assert min(map(len, places)) > 8, "the tensors of a step were found"
    assert not any(one & other for one, other in combinations(places, 2))


def tensors_of(step: StepMetadata) -> list[torch.Tensor]:
    """Every tensor that a step has."""
    return [tensor for part in vars(step).values() for tensor in tensors_in(part)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["full", "scattered"])
def test_queries_of_a_draft_are_counted_on_the_rank(rows: str) -> None:
    """xLLM#1997: 2 requests of 4 tokens over 2 ranks, kv 9 and 6; the last offset is at most the rank's rows."""
    options = {**ON, "dsa_cp_rows": rows, "dsa_cp_key_mode": "replicate" if rows == "full" else "gather_hidden"}
    held, new_tokens = {"a": 5, "b": 2}, {"a": 4, "b": 4}
    ranks = run(2, "tests.module.draft_work:local_lengths", [(options, held, new_tokens, 3)] * 2)
    first = [steps[0] for steps in ranks]
    assert [(local.splits, local.cu_seqlens_q, local.seqused_kv) for local in first] == [
        (True, [0, 4, 4], [9, 0]),
        (True, [0, 0, 4], [0, 6]),
    ]
    frequencies = drafting({}, None, {})[0].split_kind.frequencies
    for rank, steps in enumerate(ranks):
        due = draft_metadata(int32(0, 4, 8), int32(9, 6), 2, rank, 1, frequencies)[0]
        assert steps[0].cu_seqlens_q == due.local_query_start_loc.tolist()
        assert steps[0].seqused_kv == due.local_seq_lens.tolist()
        assert steps[0].cu_seqlens_q[-1] <= steps[0].num_rows
        for i, local in enumerate(steps[1:], 1):
            assert (local.splits, local.seqused_kv) == (False, [9 + i, 6 + i])


@pytest.mark.slow
def test_rows_and_positions_are_equally_many() -> None:
    """sglang#19367: round robin, 4 ranks, 8 tokens; rank 3 has positions 3 and 7, in the draft as in the target."""
    options = {
        **ON,
        "prefill_cp_mode": "round_robin",
        "dsa_cp_rows": "scattered",
        "dsa_cp_key_mode": "gather_hidden",
    }
    ranks = run(4, "tests.module.draft_work:local_lengths", [(options, {"a": 0}, {"a": 8}, 2)] * 4)
    assert [steps[0].positions for steps in ranks] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [steps[0].num_rows for steps in ranks] == [2] * 4
    assert [steps[1].positions for steps in ranks] == [[8]] * 4


def test_a_request_without_tokens_drafts_nothing() -> None:
    layer, caches = drafting({}, None, {"a": 6, "b": 3, "c": 2})
    steps = draft_steps([layer], caches, {"b": 2, "a": 0, "c": 1}, 2)
    assert [step.batches[1].query_start_loc.tolist() for step in steps] == [[0, 2, 2, 3], [0, 1, 1, 2]]
    assert [step.batches[1].seq_lens.tolist() for step in steps] == [[5, 6, 3], [6, 6, 4]]


def test_one_draft_step_is_a_step() -> None:
    layer, caches = drafting({}, None, {"a": 6, "b": 0})
    mine = draft_steps([layer], caches, {"a": 2, "b": 5}, 1, num_input_tokens=9)[0]
    due = step_metadata([layer], caches, {"a": 2, "b": 5}, num_input_tokens=9)
    assert mine.num_rows == 9
    assert_same(tensors_of(mine), tensors_of(due))


# --- rows and ranks ---


def scattered(split: str) -> dict[str, Any]:
    """Options with which every rank has its own rows."""
    return {**ON, "prefill_cp_mode": split, "dsa_cp_rows": "scattered", "dsa_cp_key_mode": "gather_hidden"}


FULL = {**ON, "prefill_cp_mode": "zigzag"}
# (options of source and target, their new tokens, source's token for each of target's, rows stay where they are)
HANDED = {
    "the same split": ((scattered("zigzag"),) * 2, ({"a": 8, "b": 3},) * 2, None, True),
    "all rows everywhere": ((FULL, FULL), ({"a": 8, "b": 3},) * 2, None, True),
    "another split, verl#7297": ((scattered("contiguous"), scattered("zigzag")), ({"a": 8},) * 2, None, False),
    "pages": ((scattered("zigzag"), scattered("round_robin_page(4)")), ({"a": 7, "b": 1},) * 2, None, False),
    "fewer tokens": (
        (scattered("zigzag"),) * 2,
        ({"a": 3, "b": 8}, {"a": 1, "b": 8}),
        [0, *range(3, 11)],
        False,
    ),
    "fewer tokens of all": ((FULL, FULL), ({"a": 3, "b": 8}, {"a": 1, "b": 8}), [0, *range(3, 11)], False),
    "from a split step to one by heads": (
        (scattered("zigzag"),) * 2,
        ({"a": 3, "b": 8}, {"a": 1, "b": 1}),
        [0, 3],
        False,
    ),
    "fewer tokens than ranks": ((scattered("zigzag"), scattered("contiguous")), ({"a": 2},) * 2, None, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HANDED)
def test_hidden_rows_come_to_the_tokens_they_were_made_of(name: str) -> None:
    pair, new_tokens, tokens, unmoved = HANDED[name]
    count = sum(new_tokens[0].values())
    asked = [count - 1, 0, count // 2]
    for rank in run(4, "tests.module.draft_work:handed", [(pair, new_tokens, tokens, asked)] * 4):
        assert rank.unmoved == unmoved
        made_of = range(count) if tokens is None else tokens
        assert rank.rows == [[0.0 if token < 0 else made_of[token] + 1.0] * 2 for token in rank.tokens]
        assert rank.everywhere == [[token + 1.0] * 2 for token in asked]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "num_rows"), [(scattered("contiguous"), 4), (ON, 8)])
def test_rows_of_a_padded_step_fit_as_they_are(options: dict[str, Any], num_rows: int) -> None:
    args = ((options,) * 2, ({"a": 3, "b": 2},) * 2, None, [4], 3)
    for rank in run(2, "tests.module.draft_work:handed", [args] * 2):
        assert rank.unmoved
        assert rank.rows == [[token + 1.0 if 0 <= token < 5 else 0.0] * 2 for token in rank.tokens]
        assert len(rank.rows) == num_rows
        assert rank.everywhere == [[5.0] * 2]
    args = ((options,) * 2, ({"a": 3, "b": 2}, {"a": 2, "b": 2}), [0, 1, 3, 4], [4], 3)
    for rank in run(2, "tests.module.draft_work:handed", [args] * 2):
        made_of = dict(enumerate([1.0, 2.0, 4.0, 5.0]))
        assert rank.rows == [[made_of.get(token, 0.0)] * 2 for token in rank.tokens]


@pytest.mark.slow
def test_the_head_finds_the_last_row_of_every_request() -> None:
    """xLLM cp_input_partition: padded zigzag, 2 ranks, lengths 5 and 8; token 12 is row 7 of rank 0, not 5."""
    partition = partition_tokens(int32(0, 5, 13), 2, split="zigzag_padded")
    assert int(partition.token_indices[0][7]) == 12
    args = ((scattered("zigzag_padded"),) * 2, ({"a": 5, "b": 8},) * 2, None, [4, 12])
    for rank in run(2, "tests.module.draft_work:handed", [args] * 2):
        assert rank.everywhere == [[5.0] * 2, [13.0] * 2]


def test_ids_are_shifted_before_they_are_split() -> None:
    """NeMo Automodel#3543: on 2 ranks, rank 0's last id is rank 1's first, not its own."""
    layer, caches = drafting({}, None, {"a": 0, "b": 0, "c": 0})
    step = step_metadata([layer], caches, {"a": 3, "b": 0, "c": 2}, num_input_tokens=7)
    offsets = step.batches[1].query_start_loc
    ids, following = torch.tensor([5, 6, 7, 1, 2]), torch.tensor([8, -9, 3])
    shifted = shifted_tokens(ids, offsets, following)
    assert shifted.tolist() == [6, 7, 8, 2, 3]
    assert ids.tolist() == [5, 6, 7, 1, 2]
    assert own_rows(shifted, step).tolist() == [6, 7, 8, 2, 3, 0, 0]
    partition = partition_tokens(offsets, 2)
    assert [shifted[tokens[tokens >= 0]].tolist() for tokens in partition.token_indices] == [[6, 7, 8], [2, 3]]
    with pytest.raises(ContractError, match=r"token_ids must have shape \[5\], got \[3\]; the ids of the whole step"):
        shifted_tokens(ids[:3], offsets, following)


# --- after a verify step ---


def test_a_draft_behind_a_rejected_one_does_not_count() -> None:
    drafts = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, -1, 6]])
    chosen = torch.tensor([[4, 5, 6, 7], [9, 5, 6, 7], [4, 9, 6, 7], [4, -1, 6, 7]])
    assert accepted_counts(drafts, chosen).tolist() == [3, 0, 1, 1]
    assert accepted_counts(drafts[:, :0], chosen[:, :1]).tolist() == [0] * 4
    assert accepted_counts(drafts.int(), chosen.int()).dtype == torch.int64


def test_what_stays_of_a_step() -> None:
    assert kept_tokens(int32(0, 3, 3, 6, 7), int32(1, 0, 3, 0)).tolist() == [0, 3, 4, 5]
    assert kept_tokens(int32(0), int32()).tolist() == []


def test_a_rollback_goes_back_as_far_as_there_are_spare_rows() -> None:
    """Room for two rejected drafts, seven taken back: the states of the compressors are gone."""
    model = model_of(0, {"a": 24})
    caches = caches_of(model, spare_rows=2)
    caches.open("a")
    for count in (17, 5):
        caches.advance(caches.batches({"a": count})[1])
    text = (
        r"^num_tokens must be a length of request 'a' whose state is still held, got 15 \(layer 1 pools rows from 8, "
        r"and holds them from 12"
    )
    with pytest.raises(ContractError, match=text):
        caches.roll_back("a", 15)
    assert caches.num_computed_tokens("a") == 22
    caches.roll_back("a", 20)
    assert caches.num_computed_tokens("a") == 20


# --- refusals ---


def written_in(caches: Caches) -> list[Any]:
    """All that a step could have changed."""
    parts = [cache.tensors for cache in caches]
    return [[part.clone() for part in tensors_in(tuple(parts))], [list(cache.lengths) for cache in caches]]


def test_a_refused_draft_step_writes_nothing() -> None:
    weights = TOY.draft
    layer = filled(drafting({}, None, {})[0], weights)
    caches = Caches(FOUR_GROUPS, [layer.layer_idx], num_tokens=12, max_requests=2, block_size=4, dtype="float64")
    caches.open("a")
    rows = torch.tensor(np.random.default_rng(0).standard_normal((6, FOUR_GROUPS.hidden_size)))
    first, second = draft_steps([layer], caches, {"a": 6}, 2)
    cache = caches[layer.layer_idx]
    before = written_in(caches)
    refused: list[tuple[str, Callable[[], Any]]] = [
        (r"hidden_states must have shape \[6, 8\], got \[5, 8\]", lambda: layer(rows[:5], first, cache)),
        (r"state of request 'a' must hold 6 tokens in layer 3, got 0", lambda: layer(rows[:1], second, cache)),
        (
            r"new_tokens must keep request 'a' within num_tokens 12, got 13 after 0",
            lambda: draft_steps([layer], caches, {"a": 6}, 8),
        ),
    ]
    for text, call in refused:
        with pytest.raises(ContractError, match=text):
            call()
        assert_same(written_in(caches), before)
    layer(rows, first, cache)
    layer(rows[:1], second, cache)  # the plan still stands
    assert caches.num_computed_tokens("a") == 7


def test_a_draft_that_was_not_rolled_back_is_refused() -> None:
    """Its keys of rejected tokens would stay, and all positions behind them would be wrong."""
    model = model_of(0, {"a": 24})
    layers, caches = layers_of(model), caches_of(model)
    caches.open("a")
    caches.advance(caches.batches({"a": 7})[1])
    source = step_metadata(layers, caches, {"a": 2})
    layer, draft_caches = drafting({}, None, {"a": 8}, spare_rows=1)
    target = draft_steps([layer], draft_caches, {"a": 2}, 2)[0]
    rows, parallel = torch.zeros(2, 8), parallel_of()
    text = (
        "^target must have position 7 for token 0, as in source, got 8; roll the draft's caches back to where the "
        "target's step began; tokens are in the target's order$"
    )
    with pytest.raises(ContractError, match=text):
        handed_rows(rows, source, target, parallel)
    draft_caches.roll_back("a", 7)
    target = draft_steps([layer], draft_caches, {"a": 2}, 2)[0]
    assert handed_rows(rows, source, target, parallel) is rows


def planned(*pairs: Mapping[str, int], options: Mapping[str, Any] = ON) -> list[StepMetadata]:
    """Steps over requests with two tokens each."""
    steps = []
    for counts in pairs:
        layer, caches = drafting({}, None, dict.fromkeys(counts, 2))
        steps.append(step_metadata([layer], caches, counts))
    return steps


def test_rows_for_other_tokens_are_refused() -> None:
    parallel = parallel_of()
    rows = torch.zeros(5, 8)
    cases: list[tuple[Mapping[str, int], torch.Tensor | None, str]] = [
        ({"b": 2, "a": 3}, None, r"target must have the requests of source in their order, got \['b', 'a'\] after"),
        ({"a": 2, "b": 2}, None, "target must have 5 tokens, as handed on, got 4; name a token of source for each"),
        ({"a": 2, "b": 3}, None, "target must have request 0 for token 2, as in source, got 1; roll the draft's"),
        ({"a": 1, "b": 1}, int32(0, 5), r"tokens must name tokens in \[0, 5\), got 5"),
        ({"a": 1, "b": 1}, int32(-1, 3), r"tokens must name tokens in \[0, 5\), got -1"),
        ({"a": 1, "b": 1}, int32(1, 3), "target must have position 3 for token 0, as in source, got 2"),
    ]
    for counts, tokens, text in cases:
        source, target = planned({"a": 3, "b": 2}, counts)
        with pytest.raises(ContractError, match=f"^{text}"):
            handed_rows(rows, source, target, parallel, tokens=tokens)
    (source,) = planned({"a": 3, "b": 2})
    for call in (
        lambda: handed_rows(rows[:4], source, source, parallel),
        lambda: rows_everywhere(rows[:4], source, parallel, int32(0)),
    ):
        with pytest.raises(ContractError, match=r"^hidden_states must have 5 rows, got 4; this rank's rows of"):
            call()
    with pytest.raises(UnsupportedError, match=r"^tokens must be a CPU tensor, got a tensor on meta"):
        rows_everywhere(rows, source, parallel, int32(0).to("meta"))


@pytest.mark.slow
def test_another_group_than_the_steps_is_refused() -> None:
    text = "ContractError: parallel must have the 2 ranks that the step is split over, got {}; hand in the Parallel"
    for told in run(2, "tests.module.draft_work:refused_groups", [(scattered("zigzag"), [1, 4])] * 2):
        assert [part.startswith(text.format(size)) for part, size in zip(told, [1, 4], strict=True)] == [True, True]


def test_counts_that_do_not_hold_are_refused() -> None:
    layer, caches = drafting({}, None, {"a": 6})
    others = Caches(FOUR_GROUPS, [0], num_tokens=8, max_requests=1)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("num_steps must be an int >= 1, got 0", lambda: draft_steps([layer], caches, {"a": 1}, 0)),
        (r"layers must hold at least one attention layer", lambda: draft_steps([], caches, {"a": 1}, 1)),
        (r"layer_idx must be one of \[0\], got 3", lambda: draft_steps([layer], others, {"a": 1}, 1)),
        (r"new_tokens must be a mapping from requests", lambda: draft_steps([layer], caches, [1], 1)),  # type: ignore[arg-type]
        (r"new_tokens\['a'\] must be an int >= 0, got -1", lambda: draft_steps([layer], caches, {"a": -1}, 1)),
        (
            r"target_tokens must have shape \[1, 3\], got \[1, 2\]; one choice more",
            lambda: accepted_counts(*pair(2, 2)),
        ),
        ("target_tokens must have dtype int64, got float32", lambda: accepted_counts(pair(2, 3)[0], torch.zeros(1, 3))),
        (r"num_kept must be in \[0, 3\] for request 1", lambda: kept_tokens(int32(0, 1, 4), int32(1, 4))),
        (r"num_kept must be in \[0, 1\] for request 0", lambda: kept_tokens(int32(0, 1, 4), int32(-1, 3))),
        (r"num_kept must have shape \[2\], got \[1\]", lambda: kept_tokens(int32(0, 1, 4), int32(1))),
        (r"next_tokens must have shape \[1\]", lambda: shifted_tokens(int32(3, 4), int32(0, 2), int32(1, 2))),
        ("next_tokens must have dtype int32", lambda: shifted_tokens(int32(3, 4), int32(0, 2), int32(1).long())),
    ]
    for text, call in cases:
        with pytest.raises(ContractError, match=f"^{text}"):
            call()
    with pytest.raises(UnsupportedError, match=r"^query_start_loc must be a CPU tensor, got a tensor on meta"):
        kept_tokens(int32(0, 1, 4).to("meta"), int32(1, 3))
    with pytest.raises(UnsupportedError, match=r"^num_kept must be a CPU tensor, got a tensor on meta"):
        kept_tokens(int32(0, 1, 4), int32(1, 3).to("meta"))


def pair(num_drafts: int, num_choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts and choices of one request."""
    return torch.zeros(1, num_drafts, dtype=torch.int64), torch.zeros(1, num_choices, dtype=torch.int64)
