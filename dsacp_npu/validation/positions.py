"""Where a rank's rows stand, and the rows of the RoPE table that go with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dsacp_npu.validation.core import Check, Fault, Finding, explained, finding_at
from dsacp_npu.validation.floats import rounded
from dsacp_npu.validation.lengths import LAYOUT, positions_of_global_extents, without_prefix
from dsacp_npu.validation.view import Array, View
from dsacp_ref.partition import Int32
from dsacp_ref.rope import rope_frequencies, rope_table, yarn_frequencies

__all__ = ["CHECKS", "ROPE_CHECKS", "RopeCheck", "as_check", "rope_finding"]


def positions(view: View) -> Int32:
    """The position of every local row, -1 in pad rows."""
    return view.positions_of(view.tokens)


def consecutive(view: View, got: Array) -> Array | None:
    """Positions counted on from the first row's."""
    right = positions(view)
    real = np.flatnonzero(right >= 0)
    return right[real[0]] + np.arange(len(right)) - real[0] if len(real) else None


def consecutive_by_request(view: View, got: Array) -> Array | None:
    """Positions counted on from each request's first row here."""
    right, requests = positions(view), view.requests_of(view.tokens)
    out = right.copy()
    for request in np.unique(requests[right >= 0]):
        rows = np.flatnonzero(requests == request)
        out[rows] = right[rows[0]] + np.arange(len(rows))
    return out


def aligned_to_the_end(view: View, got: Array) -> Array:
    """What an operator believes of local queries with the whole request's length."""
    return spread(positions_of_global_extents(view), view)


def spread(own: Array, view: View) -> Array:
    """Values of real rows at their place among all local rows."""
    out = np.full(len(view.tokens), -1, np.int64)
    out[view.tokens >= 0] = own
    return out


def through_16_bit(view: View, got: Array) -> Array:
    """Positions that were bfloat16 once."""
    return rounded(positions(view).astype(np.float64), "bfloat16").astype(np.int64)


POSITION_MAKERS = (
    Fault("consecutive_positions", consecutive),
    Fault("consecutive_positions", consecutive_by_request),
    Fault("prefix_lost", lambda view, got: positions(without_prefix(view))),
    Fault("flat_tokens_as_positions", lambda view, got: view.tokens),
    Fault("rows_as_positions", lambda view, got: np.arange(len(view.tokens))),
    Fault("positions_of_global_extents", aligned_to_the_end),
    Fault("positions_in_16_bit", through_16_bit),
)

CHECKS = (
    Check(
        "positions",
        "positions",
        "the position of each local row in its request",
        LAYOUT,
        positions,
        View.place_of_row,
        POSITION_MAKERS,
        lambda view: positions(view) < 0,
    ),
)

# --- tables ---

# The table is defined to the last bit but for how cos and sin round; libraries get within an ulp of 1 of that.
STRICT = 2.0**-22
# Frequencies from float32 powers are a few ulps off, and so is the angle: right for most uses, and worth a note.
ANGLE_ULPS = 2.0**-20
ULP_OF_BFLOAT16 = 2.0**-8  # between a half and 1, with room for the angle's own rounding


class RopeCheck(NamedTuple):
    """A pair of tables beside its definition.

    Fields:
        name, title: str.
        tensors: names of cosines and sines.
        needs: as `core.Check`.
        where: the positions of its rows.
        local: bool, whether rows are this rank's.
    """

    name: str
    title: str
    tensors: tuple[str, str]
    needs: tuple[str, ...]
    where: Callable[[View], Int32]
    local: bool


ROPE_NEEDS: tuple[str, ...] = ("compress_ratio", "rope_theta", "compress_rope_theta", "rope_head_dim", "rope_factor")
ROPE_NEEDS += ("rope_beta_fast", "rope_beta_slow", "rope_original_max_position")
ROPE_CHECKS = (
    RopeCheck(
        "rope",
        "the rows of the RoPE table at the rank's positions",
        ("cos", "sin"),
        (*LAYOUT, *ROPE_NEEDS),
        positions,
        True,
    ),
    RopeCheck(
        "full_rope",
        "the rows of the RoPE table of all tokens, for the key side",
        ("full_cos", "full_sin"),
        ROPE_NEEDS,
        lambda view: view.positions_of(view.everything),
        False,
    ),
)


def frequencies(view: View, *, entries: bool, yarn: bool) -> tuple[float, ...]:
    """The frequencies of layers with entries or without, with YaRN or without."""
    theta = view.setting("compress_rope_theta" if entries else "rope_theta")
    if not yarn or view.setting("rope_factor") == 1:
        return rope_frequencies(theta, view.setting("rope_head_dim"))
    return yarn_frequencies(
        theta,
        view.setting("rope_head_dim"),
        factor=view.setting("rope_factor"),
        beta_fast=view.setting("rope_beta_fast"),
        beta_slow=view.setting("rope_beta_slow"),
        original_max_position=view.setting("rope_original_max_position"),
    )


def due_frequencies(view: View) -> tuple[float, ...]:
    """The frequencies of this layer."""
    compressed = view.setting("compress_ratio") > 1
    return frequencies(view, entries=compressed, yarn=compressed)


def table(where: Int32, freqs: tuple[float, ...]) -> Array:
    """Cosines beside sines, [rows, 2, pairs]."""
    return np.stack([part.astype(np.float64) for part in rope_table(np.maximum(where, -1), freqs)], axis=1)


def rope_finding(view: View, rope: RopeCheck) -> tuple[Finding | None, str]:
    """Where a pair of tables first differs, with its causes; or a note on how it was rounded."""
    cos, sin = (view.got(name).astype(np.float64) for name in rope.tensors)
    where, freqs = rope.where(view), due_frequencies(view)
    check = as_check(rope, rope.needs)
    due = table(where, freqs)
    width = 2 * len(freqs)
    whole = np.stack([cos, sin], axis=1) if cos.shape == sin.shape else np.zeros((0, 2, 0))
    real, wide = where >= 0, whole.shape[2] == width

    def columns(values: Array) -> Array:
        return np.repeat(values, 2, axis=2) if wide and values.shape[2] == len(freqs) else values

    def close(values: Array) -> bool:
        values = columns(values)
        fits = len(values) == len(whole) if rope.local else len(values) <= len(whole)
        if values.shape[1:] != whole.shape[1:] or not fits:
            return False
        rows = np.flatnonzero(real) if len(values) == len(due) else np.arange(len(values))
        return bool((np.abs(whole[rows] - values[rows]) <= STRICT).all())

    long_enough = len(whole) == len(due) if rope.local else len(whole) >= len(due)
    if whole.shape[2] not in (len(freqs), width) or not long_enough:
        causes = explained(view, check, whole, close, lambda made: False)
        shapes = f"shape {[len(due), len(freqs)]}", f"shapes {list(cos.shape)} and {list(sin.shape)}"
        size = int(due.size)
        return Finding(rope.name, rope.tensors[0], view.cp_rank, None, None, (), *shapes, size, size, causes), ""
    if close(due):
        return None, ""
    angles = np.abs(where[:, None] * np.array(freqs, np.float64))[:, None]
    slack = columns(np.broadcast_to(STRICT + ANGLE_ULPS * angles, due.shape))[real]
    if in_full_precision(view, rope) and bool((np.abs(whole[: len(due)][real] - columns(due)[real]) <= slack).all()):
        return None, f"{rope.tensors[0]}, rank {view.cp_rank}: frequencies or angles were rounded in another way"
    causes = explained(view, check, whole, close, lambda made: made.shape == due.shape and np.array_equal(made, due))
    apart = np.zeros(whole[: len(due)].shape, bool)
    apart[real] = ~(np.abs(whole[: len(due)][real] - columns(due)[real]) <= STRICT)
    row, which, pair = (int(i) for i in np.argwhere(apart)[0])
    found = finding_at(
        view, check, apart, columns(due), whole[: len(due)], causes, int(apart[real].size), (row, which, pair)
    )
    return Finding(**{**found.__dict__, "tensor": rope.tensors[which], "index": (row, pair)}), ""


def as_check(rope: RopeCheck, needs: tuple[str, ...]) -> Check:
    """The check of both tables together, named after the first."""
    return Check(
        rope.name,
        rope.tensors[0],
        rope.title,
        needs,
        lambda other: table(rope.where(other), due_frequencies(other)),
        View.place_of_row if rope.local else lambda view, index: view.place_of_token(index[0]),
        rope_faults(rope),
        local=rope.local,
    )


def in_full_precision(view: View, rope: RopeCheck) -> bool:
    """Whether the tables are no 16-bit floats, widened or not."""
    return not any(
        (view.got(name) == rounded(view.got(name).astype(np.float64), kind)).all()
        for name in rope.tensors
        for kind in ("bfloat16", "float16")
    )


def rope_faults(rope: RopeCheck) -> tuple[Fault, ...]:
    """The faults of a pair of tables."""

    def at(where: Callable[[View, Array], Array | None]) -> Callable[[View, Array], Array | None]:
        def made(view: View, got: Array) -> Array | None:
            places = where(view, got)
            return None if places is None else table(places.astype(np.int32), due_frequencies(view))

        return made

    def by(*, compressed: bool, entries: bool, yarn: bool) -> Callable[[View, Array], Array | None]:
        """Of a layer with entries, or of one without: the table of these frequencies."""

        def made(view: View, got: Array) -> Array | None:
            if compressed != (view.setting("compress_ratio") > 1):
                return None
            return table(rope.where(view), frequencies(view, entries=entries, yarn=yarn))

        return made

    def right(view: View) -> Array:
        return table(rope.where(view), due_frequencies(view))

    def half_split(view: View, got: Array) -> Array:
        return np.tile(right(view), (1, 1, 2))

    def in_16_bit(view: View, got: Array) -> Array | None:
        close = right(view) if got.shape == right(view).shape else np.repeat(right(view), 2, axis=2)
        low = in_full_precision(view, rope)
        return (
            None
            if low or not (np.abs(got[: len(close)] - close) <= ULP_OF_BFLOAT16)[rope.where(view) >= 0].all()
            else got
        )

    tokens = (lambda view: view.tokens) if rope.local else (lambda view: view.everything)
    moved = (
        tuple(Fault(fault.kind, at(fault.made)) for fault in POSITION_MAKERS)
        if rope.local
        else (
            Fault("prefix_lost", lambda view, got: right(without_prefix(view))),
            Fault("flat_tokens_as_positions", at(lambda view, got: tokens(view))),
        )
    )
    return (
        Fault("table_in_16_bit", in_16_bit),
        Fault("plain_frequencies", by(compressed=True, entries=True, yarn=False)),
        Fault("yarn_frequencies", by(compressed=False, entries=True, yarn=True)),
        Fault("yarn_frequencies", by(compressed=False, entries=False, yarn=True)),
        Fault("other_theta", by(compressed=True, entries=False, yarn=False)),
        Fault("other_theta", by(compressed=True, entries=False, yarn=True)),
        Fault("other_theta", by(compressed=False, entries=True, yarn=False)),
        Fault("half_split_table", half_split),
        Fault("sine_negated", lambda view, got: right(view) * np.array([[1], [-1]])),
        Fault("cos_and_sin_swapped", lambda view, got: right(view)[:, ::-1]),
        *moved,
    )
