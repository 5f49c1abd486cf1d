"""Hypothesis library for the arithmetic modules: paged caches, operator calls, compressor runs.

Lengths, sizes and tables are drawn; float contents come from a drawn seed. Whatever must not be read is poisoned: NaN
in unused slots, garbage in tables beyond the used part. Arrays come out read-only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from tests.strategies import read_only

fewer = settings(
    max_examples=max(1, settings().max_examples // 3)
)  # where an example is slow and there are three forms
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([np.float32, np.float64])
GARBAGE = (-1, 0, 1, 2**31 - 1, -(2**31), 10**6)


def int32(values) -> np.ndarray:
    return read_only(np.array(values, np.int32))


def normal(rng: np.random.Generator, *shape: int, dtype=np.float64, scale: float = 1.0) -> np.ndarray:
    return read_only((scale * rng.standard_normal(shape)).astype(dtype))


class Paged(NamedTuple):
    """Rows of several requests in a paged cache."""

    cache: np.ndarray  # [num_blocks, block_size, ...]
    table: np.ndarray  # int32[num_reqs, max_blocks]
    slots: list[list[int]]  # where the rows of each request lie


def paged(rng: np.random.Generator, requests: list[np.ndarray], block_size: int, poison=np.nan) -> Paged:
    """The requests' rows in blocks of their own, shuffled, some blocks unused; poison where no row lies."""
    counts = [-(-len(rows) // block_size) for rows in requests]
    num_blocks = sum(counts) + int(rng.integers(1, 4))
    blocks = rng.permutation(num_blocks).tolist()
    shape = requests[0].shape[1:] if requests else (1,)
    dtype = requests[0].dtype if requests else np.float64
    cache = np.full((num_blocks, block_size, *shape), poison, dtype)
    table = rng.choice(GARBAGE, (len(requests), max(counts, default=0) + int(rng.integers(0, 3)))).astype(np.int32)
    slots = []
    for request, rows in enumerate(requests):
        mine = [blocks.pop() for _ in range(counts[request])]
        table[request, : len(mine)] = mine
        slots.append([mine[i // block_size] * block_size + i % block_size for i in range(len(rows))])
        for row, slot in zip(rows, slots[-1], strict=True):
            cache[slot // block_size, slot % block_size] = row
    return Paged(read_only(cache), read_only(table), slots)


def operator_tokens(tokens: np.ndarray) -> np.ndarray:
    """A rank's tokens as an operator takes their rows: pad rows may follow the last real row, never come before it."""
    real = np.flatnonzero(tokens >= 0)
    trailing = (tokens[: len(real)] >= 0).all()
    return tokens if trailing else read_only(tokens[real])


class Call(NamedTuple):
    """One attention call on one rank's operator rows, and the same without pages."""

    q: np.ndarray
    raw: list[np.ndarray]  # raw rows of each operator row's request, as many as its extent
    entries: list[np.ndarray]
    swa: Paged
    cmp: Paged
    topk: np.ndarray  # distinct visible entries and -1, in any order
    cu_seqlens_q: np.ndarray
    seqused_kv: np.ndarray
    sink: np.ndarray
    ratio: int
    window: int
    scale: float

    @property
    def places(self) -> list[tuple[int, int] | None]:
        """(operator row, position) of every query; None without keys, or beyond the last row."""
        found: list[tuple[int, int] | None] = []
        for row, used in enumerate(self.seqused_kv.tolist()):
            length = int(self.cu_seqlens_q[row + 1] - self.cu_seqlens_q[row])
            found += [(row, used - length + j) if used else None for j in range(length)]
        return found + [None] * (len(self.q) - len(found))

    @property
    def swa_args(self) -> tuple[np.ndarray, ...]:
        return self.swa.cache, self.swa.table

    @property
    def cmp_args(self) -> tuple[np.ndarray, ...]:
        return self.cmp.cache, self.cmp.table

    @property
    def row_args(self) -> tuple[np.ndarray, ...]:
        return self.cu_seqlens_q, self.seqused_kv, self.sink


def call_of(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],  # (queries, key extent) of each operator row
    *,
    ratio: int,
    window: int,
    num_heads: int = 2,
    head_dim: int = 4,
    index_topk: int = 3,
    swa_block: int = 4,
    cmp_block: int = 3,
    beyond: int = 0,
    dtype=np.float64,
    cmp_entries: list[int] | None = None,
) -> Call:
    """A call with random contents; ``beyond`` queries belong to no row."""
    raw = [normal(rng, used, head_dim, dtype=dtype) for _, used in rows]
    counts = [used // ratio for _, used in rows] if cmp_entries is None else cmp_entries
    entries = [normal(rng, count, head_dim, dtype=dtype) for count in counts]
    cu = int32(np.concatenate([[0], np.cumsum([length for length, _ in rows])]))
    num_queries = int(cu[-1]) + beyond
    swa, cmp = paged(rng, raw, swa_block), paged(rng, entries, cmp_block)
    if not rows:
        swa, cmp = (Paged(read_only(np.full((1, 2, head_dim), np.nan, dtype)), side.table, []) for side in (swa, cmp))
    call = Call(
        normal(rng, num_queries, num_heads, head_dim, dtype=dtype),
        raw,
        entries,
        swa,
        cmp,
        np.empty(0, np.int32),
        cu,
        int32([used for _, used in rows]),
        normal(rng, num_heads, dtype=dtype),
        ratio,
        window,
        head_dim**-0.5,
    )
    topk = np.full((num_queries, index_topk), -1, np.int32)
    for query, place in enumerate(call.places):
        if place is not None:
            visible = (place[1] + 1) // ratio
            chosen = rng.permutation(visible)[: int(rng.integers(0, index_topk + 1))]
            topk[query, rng.permutation(index_topk)[: len(chosen)]] = chosen
    return call._replace(topk=read_only(topk))


@st.composite
def operator_rows(draw: st.DrawFn, *, max_rows: int = 3, max_query: int = 6, max_prefix: int = 18, first: int = 0):
    """(queries, extent) of operator rows: empty rows with and without an extent, padded graph slots, decode, chunks.

    ``first`` queries make a first row where they are given.
    """
    rows = [(first, first + draw(st.integers(0, max_prefix)))] if first else []
    for _ in range(draw(st.integers(0, max_rows))):
        length = draw(st.one_of(st.sampled_from([0, 1]), st.integers(0, max_query)))
        padded = draw(st.integers(0, 5)) == 0
        rows.append((length, 0 if padded else length + draw(st.one_of(st.just(0), st.integers(0, max_prefix)))))
    return rows


@st.composite
def calls(draw: st.DrawFn, **fixed) -> Call:
    """An attention call of legal shape."""
    sizes = {
        "ratio": st.sampled_from([1, 2, 4, 8]),
        "window": st.sampled_from([1, 2, 3, 5, 30]),
        "num_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([1, 4, 6]),
        "index_topk": st.integers(1, 4),
        "swa_block": st.integers(1, 5),
        "cmp_block": st.integers(1, 5),
        "beyond": st.sampled_from([0, 0, 2]),
        "dtype": dtypes,
    }
    drawn = {name: fixed[name] if name in fixed else draw(values) for name, values in sizes.items()}
    rows = draw(fixed.get("rows", operator_rows()))
    return call_of(np.random.default_rng(draw(seeds)), rows, **drawn)


class Compressor(NamedTuple):
    """Weights of one compressor and what goes with them."""

    weights: tuple[np.ndarray, ...]  # wkv, wgate, ape, norm_weight
    ratio: int
    overlap: bool
    freqs: tuple[float, ...]
    eps: float


def compressor_of(
    rng: np.random.Generator,
    ratio: int,
    overlap: bool,
    *,
    hidden: int = 3,
    d: int = 4,
    pairs: int = 1,
    dtype=np.float64,
) -> Compressor:
    width = 2 * d if overlap else d
    weights = (
        normal(rng, width, hidden, dtype=dtype),
        normal(rng, width, hidden, dtype=dtype),
        normal(rng, ratio, width, dtype=dtype),
        normal(rng, d, dtype=dtype),
    )
    freqs = tuple(float(np.float32(0.7**i)) for i in range(pairs))
    return Compressor(weights, ratio, overlap, freqs, 1e-6)


@st.composite
def compressors(draw: st.DrawFn, dtype=np.float64) -> Compressor:
    d = draw(st.sampled_from([2, 4]))
    return compressor_of(
        np.random.default_rng(draw(seeds)),
        draw(st.integers(1, 8)),
        draw(st.booleans()),
        d=d,
        pairs=draw(st.integers(0, d // 2)),
        dtype=dtype,
    )


@st.composite
def chunkings(draw: st.DrawFn, ratio: int, *, max_reqs: int = 3) -> list[list[int]]:
    """Steps of a batch: new tokens of each request in each step, some none, some one, some exactly a window."""
    num_reqs = draw(st.integers(1, max_reqs))
    length = st.one_of(st.sampled_from([0, 1, ratio]), st.integers(0, 2 * ratio + 2))
    return draw(st.lists(st.lists(length, min_size=num_reqs, max_size=num_reqs), min_size=1, max_size=5))


class IndexCall(NamedTuple):
    """One indexer call on one rank's operator rows."""

    q: np.ndarray
    weights: np.ndarray
    keys: list[np.ndarray]  # the index keys of each operator row's request; more than its extent completes
    side: Paged
    cu_seqlens_q: np.ndarray
    seqused_kv: np.ndarray
    ratio: int
    index_topk: int

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        return self.q, self.weights, self.side.cache, self.side.table, self.cu_seqlens_q, self.seqused_kv

    @property
    def options(self) -> dict[str, int]:
        return {"compress_ratio": self.ratio, "index_topk": self.index_topk}

    @property
    def places(self) -> list[tuple[int, int] | None]:
        """As in `Call`."""
        return Call.places.fget(self)


@st.composite
def index_calls(draw: st.DrawFn, *, dtype=None, unseen=np.nan) -> IndexCall:
    """An indexer call; keys that no query may see yet hold ``unseen``."""
    rng = np.random.default_rng(draw(seeds))
    rows, ratio = draw(operator_rows(max_prefix=30)), draw(st.sampled_from([1, 2, 4, 8]))
    dtype = dtype or draw(dtypes)
    num_heads, d, beyond = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([0, 0, 2]))
    grid = draw(st.booleans())  # small integers: ties on purpose, zeros among them

    def numbers(*shape: int) -> np.ndarray:
        drawn = rng.integers(-1, 2, shape).astype(dtype) if grid else rng.standard_normal(shape).astype(dtype)
        return read_only(drawn)

    keys = []
    for _, used in rows:
        mine = np.concatenate([numbers(used // ratio, d), np.full((int(rng.integers(0, 4)), d), unseen, dtype)])
        keys.append(read_only(mine))
    side = paged(rng, keys, draw(st.integers(1, 5)))
    if not rows:
        side = Paged(read_only(np.full((1, 2, d), np.nan, dtype)), side.table, [])
    cu = int32(np.concatenate([[0], np.cumsum([length for length, _ in rows])]))
    num_queries = int(cu[-1]) + beyond
    q, weights = numbers(num_queries, num_heads, d), numbers(num_queries, num_heads)
    used = int32([extent for _, extent in rows])
    return IndexCall(q, weights, keys, side, cu, used, ratio, draw(st.integers(1, 6)))
