"""Driving a compressor over several requests, chunk by chunk, with what it must not read poisoned in between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsacp_ref.compressor import CompressorState, CompressorWeights, compress, empty_state
from tests import plain
from tests.maths_strategies import Compressor, int32, normal
from tests.oracles import compressor as oracle
from tests.strategies import read_only


def weights_of(made: Compressor) -> CompressorWeights:
    return CompressorWeights(*made.weights)


def hidden_rows(made: Compressor, rng: np.random.Generator, lengths: list[int]) -> list[np.ndarray]:
    """Hidden rows of several requests, in the compressor's dtype."""
    wkv = made.weights[0]
    return [normal(rng, length, wkv.shape[1], dtype=wkv.dtype) for length in lengths]


def oracle_entries(made: Compressor, x: np.ndarray) -> np.ndarray:
    freqs = [np.float32(f) for f in made.freqs]
    found = oracle.entries(x, *made.weights, made.ratio, made.overlap, made.eps, freqs)
    return np.array(found).reshape(-1, len(made.weights[3]))


def plain_entries(made: Compressor, x: np.ndarray) -> np.ndarray:
    freqs = [np.float32(f) for f in made.freqs]
    return plain.entries(x, *made.weights, made.ratio, made.overlap, made.eps, freqs)


def pooled_later(length: int, ratio: int, overlap: bool) -> list[int]:
    """Positions of the first ``length`` that a later entry pools: the open window, and with overlap the one before."""
    windows = {length // ratio, length // ratio - 1} if overlap else {length // ratio}
    return [p for p in range(length) if p // ratio in windows]


def poisoned(state: CompressorState, made: Compressor) -> CompressorState:
    """The state with NaN in every number that no later entry pools, claiming to hold no more than it must."""
    kv, score = np.full_like(state.kv, np.nan), np.full_like(state.score, np.nan)
    held = state.held_start.copy()
    d = len(made.weights[3])
    for request, length in enumerate(state.num_tokens.tolist()):
        needed = pooled_later(length, made.ratio, made.overlap)
        for p in needed:
            before = made.overlap and p // made.ratio < length // made.ratio
            channels = slice(0, d) if before else slice(None)  # of the window before, only Ca is pooled again
            kv[request, p % kv.shape[1], channels] = state.kv[request, p % kv.shape[1], channels]
            score[request, p % kv.shape[1], channels] = state.score[request, p % kv.shape[1], channels]
        held[request] = needed[0] if needed else length
    return CompressorState(*map(read_only, (kv, score, held, state.num_tokens.copy())))


def kept(state: CompressorState, made: Compressor) -> CompressorState:
    """The state as it is, refusing writes."""
    return CompressorState(*map(read_only, state))


def run(
    made: Compressor,
    requests: list[np.ndarray],
    steps: list[list[int]],
    *,
    state: CompressorState | None = None,
    between: Callable[[CompressorState, Compressor], CompressorState] = kept,
    pad_rows: int = 0,
) -> tuple[list[np.ndarray], CompressorState]:
    """(entries of each request, last state) when step i brings steps[i][b] tokens of request b."""
    weights = weights_of(made)
    state = kept(empty_state(weights, len(requests)) if state is None else state, made)
    done = [0] * len(requests)
    found: list[list[np.ndarray]] = [[] for _ in requests]
    for lengths in steps:
        rows = [x[start : start + n] for x, start, n in zip(requests, done, lengths, strict=True)]
        padding = np.full((pad_rows, made.weights[0].shape[1]), np.nan, made.weights[0].dtype)
        x = read_only(np.concatenate([*rows, padding]))
        loc = int32(np.concatenate([[0], np.cumsum(lengths)]))
        compressed, after = compress(x, weights, loc, int32(done), state, made.freqs, eps=made.eps)
        for i in range(int(compressed.entry_start_loc[-1])):
            request = int(compressed.entry_requests[i])
            assert int(compressed.entry_indices[i]) == len(found[request]), "entries count up within their request"
            found[request].append(compressed.entries[i])
        done = [start + n for start, n in zip(done, lengths, strict=True)]
        assert after.num_tokens.tolist() == done
        state = between(after, made)
    d = len(made.weights[3])
    return [np.array(each, made.weights[0].dtype).reshape(-1, d) for each in found], state
