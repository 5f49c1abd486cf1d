"""A toy language model and a toy draft of it: greedy decoding, alone and with drafts that are verified.

The tokens that come out never depend on the drafts, so a story also keeps what the draft layer took and gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
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
from dsacp_npu.module import DSAttention
from dsacp_npu.parallel import Parallel, parallel_of
from dsacp_npu.rows import last_rows, own_rows
from dsacp_npu.step import StepMetadata, step_metadata
from dsacp_ref.layer import LayerWeights
from tests.layer_strategies import WINDOW, weights_of
from tests.module.worlds import FOUR_GROUPS, Model, caches_of, filled, layers_of, model_of

VOCABULARY = 16
ATTENTION = 0.6  # how much attention says beside the token itself: drafts are often right, and often wrong


class Toy(NamedTuple):
    """The target's attention layers, the draft's, and what stands around both."""

    model: Model
    draft: LayerWeights
    embedding: np.ndarray  # [vocabulary, hidden]
    head: np.ndarray  # [hidden, vocabulary]
    mix: np.ndarray  # [hidden, hidden], for the hidden state that a draft is handed
    prompts: dict[str, list[int]]


def toy_of(seed: int, lengths: Mapping[str, int]) -> Toy:
    """Random weights and prompts."""
    rng = np.random.default_rng(seed)
    hidden = FOUR_GROUPS.hidden_size
    return Toy(
        model_of(seed, dict.fromkeys(lengths, 1)),
        weights_of(rng, FOUR_GROUPS, WINDOW),
        rng.standard_normal((VOCABULARY, hidden)),
        rng.standard_normal((hidden, VOCABULARY)),
        rng.standard_normal((hidden, hidden)) / np.sqrt(hidden),
        {name: rng.integers(0, VOCABULARY, length).tolist() for name, length in lengths.items()},
    )


def normed(rows: torch.Tensor) -> torch.Tensor:
    """Rows of mean square 1; zero rows, which are pad rows, stay."""
    return rows / rows.square().mean(-1, keepdim=True).add(1e-9).sqrt()


class Verified(NamedTuple):
    """One request's part of a verify step: the tokens before it, its drafts, and how many of them stayed."""

    request: str
    start: int
    drafts: list[int]
    accepted: int


class Chain(NamedTuple):
    """What the draft layer took and gave in the steps after step 0, behind ``start`` tokens of a request."""

    request: str
    start: int
    inputs: np.ndarray
    outputs: np.ndarray


@dataclass
class Story:
    """What one rank came to know: tokens with their prompts, and rows by request and position."""

    tokens: dict[str, list[int]]
    rows: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    draft_inputs: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    draft_rows: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    verified: list[Verified] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    splits: list[tuple[bool, ...]] = field(default_factory=list)  # the target's step, then the draft's


class Speaker:
    """An engine of one rank."""

    def __init__(self, toy: Toy, parallel: Parallel | None, num_drafts: int) -> None:
        """Layers and caches; every request may be open at once."""
        self.toy, self.num_drafts = toy, num_drafts
        self.parallel = parallel_of() if parallel is None else parallel
        config = toy.model.config
        room: dict[str, Any] = {"num_tokens": 600, "max_requests": len(toy.prompts)}
        self.layers = layers_of(toy.model, parallel)
        self.caches = caches_of(toy.model, spare_rows=num_drafts, **room)
        self.draft = filled(DSAttention(config, config.num_hidden_layers, parallel, dtype="float64"), toy.draft)
        sizes: dict[str, Any] = {"block_size": 4, "dtype": "float64", "spare_rows": max(0, num_drafts - 1)}
        self.draft_caches = Caches(config, [config.num_hidden_layers], **sizes, **room)
        self.embedding, self.head, self.mix = (torch.tensor(part) for part in (toy.embedding, toy.head, toy.mix))

    def embedded(self, ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """This rank's rows of the step's ids."""
        return own_rows(self.embedding[ids], step)

    def target_rows(self, x: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """The target's last hidden rows: its layers stand on one another."""
        for i, layer in enumerate(self.layers):
            x = x + ATTENTION * layer(normed(x), step, self.caches[i])
        return x

    def draft_input(self, x: torch.Tensor, handed: torch.Tensor) -> torch.Tensor:
        """What the draft's attention takes."""
        return normed(x + normed(handed) @ self.mix)

    def chosen(self, rows: torch.Tensor) -> torch.Tensor:
        """The greedy choice after each row."""
        return (normed(rows) @ self.head).argmax(-1)


def offsets_of(step: StepMetadata) -> torch.Tensor:
    """The step's global query offsets."""
    return step.batches[1].query_start_loc


def speak(
    toy: Toy,
    arrivals: Mapping[str, int],
    parallel: Parallel | None = None,
    *,
    num_drafts: int = 0,
    num_new: int,
    chunk: int = 9,
) -> Story:
    """Every request from its prompt, fed in chunks from the step it arrives at, to so many new tokens."""
    speaker = Speaker(toy, parallel, num_drafts)
    story = Story({name: list(prompt) for name, prompt in toy.prompts.items()})
    drafts: dict[str, list[int]] = {name: [] for name in toy.prompts}
    waiting, running = dict(arrivals), list[str]()
    for turn in range(200):
        for name in [name for name, at in waiting.items() if at <= turn]:
            del waiting[name]
            running.append(name)
            speaker.caches.open(name)
            speaker.draft_caches.open(name)
        if running:
            drafts |= turn_of(speaker, story, {name: drafts[name] for name in running}, chunk)
        for name in [name for name in running if len(story.tokens[name]) >= len(toy.prompts[name]) + num_new]:
            running.remove(name)
            speaker.caches.close(name)
            speaker.draft_caches.close(name)
        if not running and not waiting:
            return story
    raise AssertionError(f"{running} still speak, {waiting} still wait")


def turn_of(speaker: Speaker, story: Story, drafts: Mapping[str, list[int]], chunk: int) -> dict[str, list[int]]:
    """A step of the target, which verifies the drafts of requests beyond their prompts, and then drafts anew."""
    prompts = speaker.toy.prompts
    done = {name: speaker.caches.num_computed_tokens(name) for name in drafts}
    asked = {}
    for name, start in done.items():
        if start < len(prompts[name]):
            asked[name] = prompts[name][start : start + chunk]
        else:
            asked[name] = [*story.tokens[name][start:], *drafts[name]]
    step = step_metadata(
        speaker.layers,
        speaker.caches,
        {name: len(ids) for name, ids in asked.items()},
        decode_query_len=1 + speaker.num_drafts,
    )
    ids = torch.tensor([token for part in asked.values() for token in part])
    rows = speaker.target_rows(speaker.embedded(ids, step), step)

    following, kept = judged(speaker, story, asked, done, drafts, step, rows)
    stay = kept_tokens(offsets_of(step), torch.tensor([*kept.values()], dtype=torch.int32))
    note(story.rows, step, rows, list(asked), set(stay.tolist()))
    for name, count in kept.items():
        if count < len(asked[name]):
            speaker.caches.roll_back(name, done[name] + count)
    if not speaker.num_drafts:
        return {}
    steps = draft_steps(
        [speaker.draft],
        speaker.draft_caches,
        kept,
        speaker.num_drafts,
        decode_query_len=1 + speaker.num_drafts,
    )
    story.splits.append((step.splits, *(part.splits for part in steps)))
    handed = handed_rows(rows, step, steps[0], speaker.parallel, tokens=None if len(stay) == len(ids) else stay)
    shifted = shifted_tokens(ids[stay], offsets_of(steps[0]), torch.tensor([*following.values()]))
    drafted = drafted_tokens(speaker, story, list(kept), steps, shifted, handed)
    for name, count in kept.items():
        speaker.draft_caches.roll_back(name, done[name] + count)
    return {name: part if len(story.tokens[name]) > len(prompts[name]) else [] for name, part in drafted.items()}


def judged(
    speaker: Speaker,
    story: Story,
    asked: Mapping[str, list[int]],
    done: Mapping[str, int],
    drafts: Mapping[str, list[int]],
    step: StepMetadata,
    rows: torch.Tensor,
) -> tuple[dict[str, int], dict[str, int]]:
    """For each request the token that follows what stays of it, and how many of its tokens stay."""
    ends = dict(zip(asked, offsets_of(step)[1:].tolist(), strict=True))
    compared = {name: range(ends[name] - 1 - len(drafts[name]), ends[name]) for name in asked}
    tokens = torch.tensor([token for part in compared.values() for token in part], dtype=torch.int32)
    choices = speaker.chosen(rows_everywhere(rows, step, speaker.parallel, tokens)).split(
        [len(part) for part in compared.values()]
    )
    following, kept = {}, {}
    for name, chosen in zip(asked, choices, strict=True):
        end = done[name] + len(asked[name])
        if end < len(story.tokens[name]):  # a chunk of the prompt
            following[name], kept[name] = story.tokens[name][end], len(asked[name])
            continue
        mine = torch.tensor(drafts[name], dtype=torch.int64)
        accepted = int(accepted_counts(mine[None], chosen[None])[0])
        if drafts[name]:
            story.verified.append(Verified(name, done[name], drafts[name], accepted))
        kept[name] = len(asked[name]) - len(drafts[name]) + accepted
        story.tokens[name] += chosen[: 1 + accepted].tolist()
        following[name] = story.tokens[name][-1]
    return following, kept


def drafted_tokens(
    speaker: Speaker,
    story: Story,
    names: Sequence[str],
    steps: Sequence[StepMetadata],
    ids: torch.Tensor,
    handed: torch.Tensor,
) -> dict[str, list[int]]:
    """The draft's greedy tokens after each request."""
    found, inputs, outputs = [], [], []
    for i, step in enumerate(steps):
        x = speaker.embedded(ids, step)
        taken = speaker.draft_input(x, handed)
        attended = speaker.draft(taken, step, speaker.draft_caches[speaker.draft.layer_idx])
        rows = x + ATTENTION * attended
        if i == 0:
            note(story.draft_inputs, step, taken, names)
            note(story.draft_rows, step, attended, names)
        else:
            inputs.append(taken.numpy())
            outputs.append(attended.numpy())
        last = last_rows(rows, step, speaker.parallel)
        ids = speaker.chosen(last)
        found.append(ids.tolist())
        if i + 1 < len(steps):
            handed = own_rows(last, steps[i + 1])
    ends = steps[0].batches[1].seq_lens.tolist()
    for b, name in enumerate(names):
        if inputs:
            story.chains.append(
                Chain(name, ends[b], *(np.stack([part[b] for part in parts]) for parts in (inputs, outputs)))
            )
    return {name: [step[b] for step in found] for b, name in enumerate(names)}


def note(
    book: dict[tuple[str, int], np.ndarray],
    step: StepMetadata,
    rows: torch.Tensor,
    names: Sequence[str],
    stay: set[int] | None = None,
) -> None:
    """Write down the rows that this rank has, of tokens that stay."""
    ends = offsets_of(step)[1:]
    for token, position, row in zip(step.token_indices.tolist(), step.positions.tolist(), rows, strict=True):
        if token >= 0 and (stay is None or token in stay):
            book[names[int(torch.searchsorted(ends, token, right=True))], position] = row.numpy()
