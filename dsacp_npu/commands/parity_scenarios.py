"""What happens in a `parity` cell: the steps of an engine that serves a few requests, as ragged batches.

A plan says in a few words which request gets how many tokens in which step; `scenario` makes arrays of it, with
everything awkward that an engine may do: shuffled blocks and state slots, block tables that hold garbage behind their
used part, requests that share a prefix's blocks, and NaN in every row that belongs to nobody.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dsacp_ref.layer import LayerBatch

BLOCK_SIZE = 8  # raw tokens a block
CMP_BLOCK_SIZE = 3  # entries a block: divides nothing else here
SPARE_BLOCKS = 4  # that stay NaN


@dataclass(frozen=True, kw_only=True)
class Plan:
    """New tokens of each request in each step, requests in batch order.

    Args:
        steps: per step a dict request -> new tokens. A name that starts with "_" is a padded graph slot: its queries
            count as rows, and nothing else.
        forks: request -> (parent, position): it starts from the parent's state at that position, shares the parent's
            full blocks and copies a block that is cut. A step of the parent must end there.
        padding: rows that the stream of each step has beyond the last request.
        before: tokens that requests have before the first step, in caches that every run is given.
    """

    name: str
    steps: tuple[dict[str, int], ...]
    forks: dict[str, tuple[str, int]] = field(default_factory=dict)
    padding: int = 0
    before: dict[str, int] = field(default_factory=dict)


PLANS = {
    plan.name: plan
    for plan in (
        Plan(name="long", steps=({"a": 650},)),
        # A dozen prompts, two of them empty; then fewer tokens than ranks, and a rank's worth of nothing.
        Plan(
            name="short",
            steps=(
                dict(zip("abcdefghijkl", (1, 0, 2, 3, 140, 5, 17, 0, 4, 128, 9, 64), strict=True)),
                {"m": 1, "b": 0, "e": 1},
            ),
        ),
        # 173 is no multiple of 4, 128 or a block; c completes an entry of 128 tokens that it began in its parent.
        Plan(
            name="prefix",
            steps=({"a": 128}, {"a": 45}, {"a": 60, "b": 40, "c": 90}, {"b": 95, "a": 30, "c": 2}),
            forks={"b": ("a", 128), "c": ("a", 173)},
        ),
        Plan(
            name="inside",
            steps=(
                {"a": 1, "b": 6},
                {"a": 2, "b": 1},
                {"b": 119, "a": 4},
                {"a": 123, "b": 5},
                {"a": 1, "b": 70},
                {"b": 1, "a": 126, "c": 1},
                {"c": 1, "a": 1, "b": 60},
            ),
        ),
        Plan(
            name="on",
            steps=(
                {"a": 4, "b": 128},
                {"a": 124, "b": 4},
                {"a": 128, "b": 124},
                {"b": 8, "a": 4, "c": 64},
            ),
        ),
        # The third step only decodes: it runs by heads, in the middle of context-parallel ones.
        Plan(
            name="mixed",
            steps=(
                {"a": 130, "b": 5, "c": 127},
                {"c": 1, "d": 150, "a": 1, "b": 1},
                {"a": 1, "b": 1, "c": 1, "d": 1},
                {"b": 1, "e": 40, "d": 1, "a": 1, "c": 1},
            ),
        ),
        Plan(
            name="padded",
            steps=({"a": 131, "_1": 5, "b": 60, "_2": 2}, {"_1": 3, "a": 1, "b": 90, "c": 33}, {"a": 25, "_1": 1}),
            padding=5,
        ),
    )
}


class Step(NamedTuple):
    """One step of the engine.

    Fields:
        x: float32[num_rows, hidden], NaN in the rows of graph slots and of padding.
        batch: LayerBatch.
        requests: the name of each batch row's request.
        block_copies: (kind, from, to), cache blocks copied before the step; kind "swa" or "cmp".
        state_copies: (from, to), state slots copied after the step.
    """

    x: np.ndarray
    batch: LayerBatch
    requests: tuple[str, ...]
    block_copies: tuple[tuple[str, int, int], ...]
    state_copies: tuple[tuple[int, int], ...]


class Scenario(NamedTuple):
    """The steps, and each request's whole stream of hidden rows, prefix included.

    Fields:
        name: of the plan.
        ratio: compress ratio of the layer it is for.
        streams: request -> float32[tokens, hidden].
        steps: Step.
        before: Step that fills the caches which every run is given; None where they start empty.
        block_size, cmp_block_size, num_blocks, num_cmp_blocks, num_slots: sizes of the caches.
    """

    name: str
    ratio: int
    streams: dict[str, np.ndarray]
    steps: tuple[Step, ...]
    before: Step | None
    block_size: int
    cmp_block_size: int
    num_blocks: int
    num_cmp_blocks: int
    num_slots: int


class Tokens(NamedTuple):
    """Where the rows of a step belong; request and position are -1 in rows of no request."""

    requests: np.ndarray
    positions: np.ndarray


def step_tokens(step: Step) -> Tokens:
    """Batch row and position of every row of the step, counted out from lengths alone."""
    return batch_tokens(step.batch.query_start_loc, step.batch.seq_lens, len(step.x))


def batch_tokens(query_start_loc: np.ndarray, seq_lens: np.ndarray, num_rows: int) -> Tokens:
    """The same of so many rows, from a batch's lengths."""
    requests, positions = np.full((2, num_rows), -1)
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, stop = int(query_start_loc[request]), int(query_start_loc[request + 1])
        if seq_len:
            requests[start:stop], positions[start:stop] = request, np.arange(seq_len - (stop - start), seq_len)
    return Tokens(requests, positions)


def is_slot(request: str) -> bool:
    """Whether this name stands for a padded graph slot."""
    return request.startswith("_")


def totals(plan: Plan) -> dict[str, int]:
    """All tokens of each request, those of its shared prefix included."""
    lengths = {name: position for name, (_, position) in plan.forks.items()}
    for step in (plan.before, *plan.steps):
        for name, new in step.items():
            lengths[name] = lengths.get(name, 0) + new
    return lengths


def hidden_streams(plan: Plan, hidden_size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The hidden rows of every request; a fork begins with its parent's."""
    streams = {
        name: rng.standard_normal((length, hidden_size), dtype=np.float32)
        for name, length in totals(plan).items()
        if not is_slot(name)
    }
    for name, (parent, position) in plan.forks.items():
        streams[name][:position] = streams[parent][:position]
    return streams


class Blocks:
    """One kind of cache block, handed out in shuffled order: raw keys (ratio 1), or entries of ``ratio`` tokens."""

    def __init__(self, plan: Plan, kind: str, block_size: int, ratio: int, rng: np.random.Generator) -> None:
        """Give every request the blocks of its whole stream."""
        self.kind, self.block_size, self.ratio, self.rng = kind, block_size, ratio, rng
        needed = {name: self.blocks_in_use(total) for name, total in totals(plan).items() if not is_slot(name)}
        self.count = sum(needed.values()) + SPARE_BLOCKS
        free = rng.permutation(self.count).tolist()
        self.owned: dict[str, list[int]] = {}
        self.cuts: dict[str, tuple[int, int]] = {}  # a fork's first own block, and the parent's that it starts from
        for name in sorted(needed, key=lambda name: name in plan.forks):  # parents first
            parent, position = plan.forks.get(name, ("", 0))
            full, rest = divmod(position // ratio, block_size)
            shared = self.owned[parent][:full] if parent else []
            self.owned[name] = shared + [free.pop() for _ in range(needed[name] - full)]
            if rest:
                self.cuts[name] = self.owned[parent][full], self.owned[name][full]

    def blocks_in_use(self, num_tokens: int) -> int:
        """The blocks that hold this many tokens of a request."""
        return -(-(num_tokens // self.ratio) // self.block_size)

    def table(self, requests: list[str], lengths: list[int]) -> np.ndarray:
        """The block table of a step; behind the blocks in use stands anything."""
        used = [self.blocks_in_use(length) for length in lengths]
        width = max(used, default=0) + 2
        table = self.rng.choice(np.array([-1, 0, 1, 2**31 - 1], np.int32), (len(requests), width))
        for row, (name, count) in enumerate(zip(requests, used, strict=True)):
            table[row, :count] = self.owned.get(name, [])[:count]
        return table


def scenario(
    plan: Plan,
    ratio: int,
    *,
    hidden_size: int,
    seed: int,
    block_size: int = BLOCK_SIZE,
    cmp_block_size: int = CMP_BLOCK_SIZE,
) -> Scenario:
    """The arrays of a plan, for a layer of this ratio. Hidden rows are the same for all ratios."""
    key = [seed, zlib.crc32(plan.name.encode())]
    streams = hidden_streams(plan, hidden_size, np.random.default_rng(key))
    rng = np.random.default_rng([*key, ratio])
    raw, entries = Blocks(plan, "swa", block_size, 1, rng), Blocks(plan, "cmp", cmp_block_size, ratio, rng)
    kinds = (raw, entries) if ratio > 1 else (raw,)
    names = sorted({*streams, *(name for step in plan.steps for name in step)})
    num_slots = len(names) + 2
    slots = dict(zip(names, rng.permutation(num_slots).tolist()[: len(names)], strict=True))
    done = {name: plan.forks.get(name, ("", 0))[1] for name in streams}
    waiting = set(plan.forks)
    steps = []
    for planned in (plan.before, *plan.steps) if plan.before else plan.steps:
        requests = list(planned)
        copies = [(b.kind, *b.cuts[name]) for name in requests if name in waiting for b in kinds if name in b.cuts]
        waiting -= set(requests)
        rows = [np.full((planned[name], hidden_size), np.nan, np.float32) for name in requests]
        for name, part in zip(requests, rows, strict=True):
            if not is_slot(name):
                part[:] = streams[name][done[name] : done[name] + len(part)]
                done[name] += len(part)
        lens = [done.get(name, 0) for name in requests]
        batch = LayerBatch(
            np.cumsum([0, *map(len, rows)]).astype(np.int32),
            np.array(lens, np.int32),
            raw.table(requests, lens),
            entries.table(requests, lens),
            np.array([slots[name] for name in requests], np.int32),
        )
        snapshots = tuple(
            (slots[parent], slots[name])
            for name, (parent, position) in plan.forks.items()
            if planned.get(parent) and done[parent] == position
        )
        x = np.concatenate([*rows, np.full((plan.padding, hidden_size), np.nan, np.float32)])
        steps.append(Step(x, batch, tuple(requests), tuple(copies), snapshots))
    before = steps.pop(0) if plan.before else None
    sizes = (block_size, cmp_block_size, raw.count, entries.count, num_slots)
    return Scenario(plan.name, ratio, streams, tuple(steps), before, *sizes)
