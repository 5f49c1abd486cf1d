"""Hypothesis library: batches, splits and groups, with the awkward cases drawn on purpose.

Arrays come out read-only, so a function that changes its input fails loudly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from hypothesis import note, settings
from hypothesis import strategies as st

from dsacp_ref.config import SPLITS

FLAT_SPLITS = ("contiguous", "round_robin")  # the rules that cut a padded stream
EVERY_SPLIT = tuple("round_robin_page(3)" if name == "round_robin_page" else name for name in SPLITS)


class Batch(NamedTuple):
    """Host lengths of one step."""

    query_lens: list[int]
    seq_lens: list[int]  # 0 for a padded graph slot

    @property
    def query_start_loc(self) -> np.ndarray:
        return read_only(np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32))

    @property
    def key_lens(self) -> np.ndarray:
        return read_only(np.array(self.seq_lens, np.int32))

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


def read_only(array: np.ndarray) -> np.ndarray:
    """The array, refusing writes."""
    array.setflags(write=False)
    return array


cp_sizes = st.integers(1, 8)


@st.composite
def splits(draw: st.DrawFn) -> str:
    """A split rule by its text, pages of 1 to 9 tokens among them."""
    name = draw(st.sampled_from(SPLITS))
    return f"{name}({draw(st.integers(1, 9))})" if name == "round_robin_page" else name


@st.composite
def batches(draw: st.DrawFn, *, max_reqs: int = 6, max_query: int = 16, max_prefix: int = 20) -> Batch:
    """A step: no requests, empty requests, decode rows, prefix hits, padded graph slots at the end."""
    query_lens, seq_lens = [], []
    for _ in range(draw(st.integers(0, max_reqs))):
        query_len = draw(st.one_of(st.just(0), st.just(1), st.integers(0, max_query)))
        prefix = draw(st.one_of(st.just(0), st.integers(0, max_prefix)))
        query_lens.append(query_len)
        seq_lens.append(query_len + prefix)
    for _ in range(draw(st.one_of(st.just(0), st.integers(0, 2)))):
        query_lens.append(draw(st.integers(1, 4)))
        seq_lens.append(0)
    return Batch(query_lens, seq_lens)


@st.composite
def padded_counts(draw: st.DrawFn, batch: Batch, split: str) -> int | None:
    """Rows of the stream: none given, the real count, or graph padding where the rule can cut it."""
    if split not in FLAT_SPLITS:
        return draw(st.sampled_from([None, batch.num_tokens]))
    return draw(st.one_of(st.none(), st.integers(batch.num_tokens, batch.num_tokens + 20)))


class Step(NamedTuple):
    """One step and how it is cut."""

    batch: Batch
    cp_size: int
    split: str
    num_input_tokens: int | None

    @property
    def cut(self) -> dict[str, object]:
        """The keyword arguments that name the cut."""
        return {"split": self.split, "num_input_tokens": self.num_input_tokens}


@st.composite
def steps(draw: st.DrawFn, *, split: st.SearchStrategy[str] | None = None) -> Step:
    """A batch, a group, a rule and perhaps graph padding; fewer tokens than ranks is common."""
    batch = draw(batches())
    rule = draw(splits() if split is None else split)
    return Step(batch, draw(cp_sizes), rule, draw(padded_counts(batch, rule)))


@st.composite
def cuts(draw: st.DrawFn) -> list[Step]:
    """One batch and group under every rule: a random rule is drawn so unevenly that some would hardly be seen."""
    batch, cp_size = draw(batches()), draw(st.sampled_from((2, 3, 4, 1, 5, 6, 7, 8)))
    names = [f"{name}({draw(st.integers(1, 9))})" if name == "round_robin_page" else name for name in SPLITS]
    return [Step(batch, cp_size, name, draw(padded_counts(batch, name))) for name in names]


def each(steps_of_all: list[Step]) -> Iterator[Step]:
    """The steps one by one; the last one that a failure prints is the one that failed."""
    for step in steps_of_all:
        note(repr(step))
        yield step


def fewer(parts: int) -> settings:
    """Fewer examples, for a test that does the work of several in each."""
    return settings(max_examples=max(5, settings.default.max_examples // parts))


@st.composite
def token_rows(draw: st.DrawFn, num_rows: int) -> np.ndarray:
    """A row-aligned array of any dtype and rank, every element its own number; no row is all zero."""
    shape = (num_rows, *draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])))
    dtype = draw(st.sampled_from([np.int32, np.int64, np.float32, np.float64]))
    return read_only(np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(dtype))


def int32(*values: int) -> np.ndarray:
    """A read-only int32 vector."""
    return read_only(np.array(values, np.int32))
