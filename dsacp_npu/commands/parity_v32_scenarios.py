"""What happens in a cell of `parity --model v32`: the steps of an engine, as token ids in ragged batches.

The plans are made of the same words as those of `parity_scenarios`, and what an engine may do is the same: shuffled
blocks, tables that hold garbage behind their used part, shared and copied blocks of prefixes. All parts of V3.2's cache
have one block table, and no request has a state. A padded graph slot's tokens have an id whose embedding is NaN.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from dsacp_npu.commands.parity_scenarios import Blocks, Plan, Tokens, batch_tokens, is_slot, totals
from dsacp_ref.mla_layer import MLABatch

BLOCK_SIZE = 8
VOCAB = 64
NOBODY = VOCAB - 1  # the token id of graph slots

# A query chooses 6 tokens, so few are enough.
STACK_PLANS = {
    plan.name: plan
    for plan in (
        Plan(name="long", steps=({"a": 150},)),
        Plan(
            name="short",
            steps=(
                dict(zip("abcdefghijkl", (1, 0, 2, 3, 40, 5, 17, 0, 4, 32, 9, 16), strict=True)),
                {"m": 21, "b": 0, "e": 8},
            ),
        ),
        # Ranks without a row, in prompts, among chunks and in decode.
        Plan(name="few", steps=({"a": 2, "b": 1}, {"c": 1, "a": 1}, {"b": 3, "d": 0}, {"a": 1})),
        # 45 is no multiple of a block: c copies the block that its prefix ends in, b shares whole ones.
        Plan(
            name="prefix",
            steps=({"a": 32}, {"a": 13}, {"a": 20, "b": 11, "c": 25}, {"b": 27, "a": 9, "c": 2}),
            forks={"b": ("a", 32), "c": ("a", 45)},
        ),
        # Chunks that end inside blocks and on them.
        Plan(
            name="chunks",
            steps=({"a": 1, "b": 6}, {"a": 7, "b": 2}, {"b": 24, "a": 8}, {"a": 41, "b": 5}, {"b": 3, "a": 7, "c": 9}),
        ),
        # The third step only decodes.
        Plan(
            name="mixed",
            steps=(
                {"a": 40, "b": 5, "c": 33},
                {"c": 1, "d": 50, "a": 1, "b": 1},
                {"a": 1, "b": 1, "c": 1, "d": 1},
                {"b": 1, "e": 20, "d": 1, "a": 1, "c": 1},
            ),
        ),
        Plan(
            name="padded",
            steps=({"a": 41, "_1": 5, "b": 20, "_2": 2}, {"_1": 3, "a": 1, "b": 30, "c": 13}, {"a": 15, "_1": 1}),
            padding=5,
        ),
    )
}


class StackStep(NamedTuple):
    """One step of the engine.

    Fields:
        token_ids: int32[query_start_loc[-1]]; NOBODY in graph slots.
        batch: MLABatch.
        requests: the name of each batch row's request.
        num_rows: rows of the stream with its padding.
        copies: (from, to), blocks copied before the step.
    """

    token_ids: np.ndarray
    batch: MLABatch
    requests: tuple[str, ...]
    num_rows: int
    copies: tuple[tuple[int, int], ...]

    def tokens(self) -> Tokens:
        """Where each token belongs."""
        return batch_tokens(self.batch.query_start_loc, self.batch.seq_lens, len(self.token_ids))


class StackScenario(NamedTuple):
    """The steps, and each request's whole stream of token ids, prefix included.

    Fields:
        name: of the plan.
        streams: request -> int32[tokens].
        steps: StackStep.
        before: StackStep that fills the caches which every run is given; None where they start empty.
        block_size, num_blocks: sizes of the caches.
    """

    name: str
    streams: dict[str, np.ndarray]
    steps: tuple[StackStep, ...]
    before: StackStep | None
    block_size: int
    num_blocks: int


def stack_scenario(plan: Plan, *, seed: int, block_size: int = BLOCK_SIZE) -> StackScenario:
    """The arrays of a plan."""
    rng = np.random.default_rng([seed, zlib.crc32(plan.name.encode())])
    streams = token_streams(plan, rng)
    blocks = Blocks(plan, "latent", block_size, 1, rng)
    done = {name: plan.forks.get(name, ("", 0))[1] for name in streams}
    waiting = set(plan.forks)
    steps = []
    for planned in (plan.before, *plan.steps) if plan.before else plan.steps:
        requests = list(planned)
        copies = tuple(blocks.cuts[name] for name in requests if name in waiting and name in blocks.cuts)
        waiting -= set(requests)
        ids = [np.full(new, NOBODY, np.int32) for new in planned.values()]
        for name, part in zip(requests, ids, strict=True):
            if not is_slot(name):
                part[:] = streams[name][done[name] : done[name] + len(part)]
                done[name] += len(part)
        lens = [done.get(name, 0) for name in requests]
        loc = np.cumsum([0, *map(len, ids)]).astype(np.int32)
        batch = MLABatch(loc, np.array(lens, np.int32), blocks.table(requests, lens))
        steps.append(StackStep(np.concatenate(ids), batch, tuple(requests), int(loc[-1]) + plan.padding, copies))
    before = steps.pop(0) if plan.before else None
    return StackScenario(plan.name, streams, tuple(steps), before, block_size, blocks.count)


def token_streams(plan: Plan, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The token ids of every request; a fork begins with its parent's."""
    streams = {
        name: rng.integers(0, NOBODY, length).astype(np.int32)
        for name, length in totals(plan).items()
        if not is_slot(name)
    }
    for name, (parent, position) in plan.forks.items():
        streams[name][:position] = streams[parent][:position]
    return streams
