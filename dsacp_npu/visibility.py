"""Mirror of `dsacp_ref.visibility` over torch. Runs on the device of its arguments and never waits for it."""

from __future__ import annotations

from dsacp_npu._tensors import Int32, check_tensor, first_true, torch, values_known
from dsacp_npu.partition import counted
from dsacp_ref.spec import INT32_MAX, check_bool, check_int, contract_error

__all__ = [
    "entry_mask",
    "owned_entries",
    "pool_row_starts",
    "visible_entries",
    "window_mask",
    "window_starts",
]


def check_positions(positions: Int32, axis: str, *, lowest: int) -> None:
    """Refuse what no token can have as its position: position p needs p + 1 keys, and key counts are int32."""
    check_tensor("positions", positions, ("int32",), (axis,))
    if not values_known(positions):
        return
    bad = (positions < lowest) | (positions == INT32_MAX)
    if bad.any():
        hint = "-1 stands for no position" if lowest < 0 else "a run starts at a token"
        raise contract_error("positions", f"be in [{lowest}, {INT32_MAX - 1}]", int(positions[first_true(bad)]), hint)


def window_starts(positions: Int32, window_size: int) -> Int32:
    """Mirror of `dsacp_ref.visibility.window_starts`."""
    check_positions(positions, "num_tokens", lowest=-1)
    window_size = check_int("window_size", window_size, 1, INT32_MAX)
    return (positions - (window_size - 1)).clamp(min=0)


def visible_entries(positions: Int32, compress_ratio: int) -> Int32:
    """Mirror of `dsacp_ref.visibility.visible_entries`."""
    check_positions(positions, "num_tokens", lowest=-1)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX)
    return (positions + 1) // compress_ratio


def window_mask(positions: Int32, num_keys: int, window_size: int) -> torch.Tensor:
    """Mirror of `dsacp_ref.visibility.window_mask`."""
    starts = window_starts(positions, window_size)
    keys = counted(check_int("num_keys", num_keys, 0, INT32_MAX), positions)
    return (keys >= starts[:, None]) & (keys <= positions[:, None])


def entry_mask(positions: Int32, num_entries: int, compress_ratio: int) -> torch.Tensor:
    """Mirror of `dsacp_ref.visibility.entry_mask`."""
    num_entries = check_int("num_entries", num_entries, 0, INT32_MAX)
    visible = visible_entries(positions, compress_ratio)
    return counted(num_entries, visible) < visible[:, None]


def owned_entries(starts: Int32, ends: Int32, compress_ratio: int) -> tuple[Int32, Int32]:
    """Mirror of `dsacp_ref.visibility.owned_entries`."""
    check_tensor("starts", starts, ("int32",), ("num_runs",))
    check_tensor("ends", ends, ("int32",), tuple(starts.shape))
    if values_known(starts, ends) and ((starts < 0) | (ends < starts)).any():
        run = first_true((starts < 0) | (ends < starts))
        got = f"[{int(starts[run])}, {int(ends[run])}) as run {run}"
        rule = "be runs [start, end) with 0 <= start <= end"
        raise contract_error("starts and ends", rule, got, "ends are exclusive")
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX)
    return starts // compress_ratio, ends // compress_ratio


def pool_row_starts(positions: Int32, compress_ratio: int, *, overlap: bool) -> Int32:
    """Mirror of `dsacp_ref.visibility.pool_row_starts`."""
    check_positions(positions, "num_runs", lowest=0)
    check_bool("overlap", overlap)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1, INT32_MAX // 2)
    open_window = positions // compress_ratio * compress_ratio
    return (open_window - compress_ratio).clamp(min=0) if overlap else open_window
