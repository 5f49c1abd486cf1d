"""`npu_sparse_attn_sharedkv` and its metadata: one query row at a time, in float32, rounded once."""

from __future__ import annotations

from itertools import pairwise

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.checks import (
    HALVES,
    KeyRows,
    check_block_size,
    check_one_of,
    check_tensor,
    lengths_of,
    prefix_sums,
    required,
)
from dsacp_npu.emulator.errors import out_of_range, refusal
from dsacp_npu.emulator.fingerprint import check_metadata, metadata_tensor

__all__ = ["attention", "attention_fake", "attention_metadata"]

NAME = "npu_sparse_attn_sharedkv"
WIDTH = 512
MAX_HEADS = 128
Tensor = torch.Tensor


def attention(
    q: Tensor,
    *,
    ori_kv: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    ori_sparse_indices: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None,
    ori_block_table: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_ori_kv: Tensor | None = None,
    cu_seqlens_cmp_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    metadata: Tensor | None = None,
    softmax_scale: float = 0,
    cmp_ratio: int = 0,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 128,
    ori_win_right: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_ND",
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator: window rows and entries under one softmax with the sink, queries right-aligned to the keys.

    Rows that it leaves alone are NaN here: padding beyond `cu_seqlens_q[-1]`. Rows before position 0 are zeros.
    Ignored, as on the device: `seqused_q` with BSND queries, `cu_seqlens_*_kv` with PA_ND keys, table columns beyond
    the extents, index columns beyond `min(K, n)`.
    """
    check_queries(q, layout_q, layout_kv)
    check_modes(ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right)
    if ori_sparse_indices is not None:
        raise refusal(
            NAME, "ori_sparse_indices", "be None", "a tensor", "documented as ignored, but read by the kernel as slots"
        )
    if return_softmax_lse:
        raise refusal(NAME, "return_softmax_lse", "be False", True, "the value would include the sink")
    sinks = required(NAME, "sinks", sinks)
    check_tensor(NAME, "sinks", sinks, (torch.float32,), (q.shape[-2],))
    if cmp_kv is None and cmp_sparse_indices is not None:
        raise refusal(NAME, "cmp_kv", "be given with cmp_sparse_indices", None)
    if cmp_kv is not None:
        check_one_of(NAME, "cmp_ratio", cmp_ratio, (4, 128))

    starts = query_starts(q, layout_q, cu_seqlens_q, seqused_q)
    batch = len(starts) - 1
    window = key_rows("ori", q, required(NAME, "ori_kv", ori_kv), layout_kv, ori_block_table, cu_seqlens_ori_kv, batch)
    entries = None
    if cmp_kv is not None:
        entries = key_rows("cmp", q, cmp_kv, layout_kv, cmp_block_table, cu_seqlens_cmp_kv, batch)
    rows_of_keys = ori_kv.shape[1] if layout_kv == "BSND" else 0  # type: ignore[union-attr]
    kv_lengths = key_lengths(layout_kv, seqused_kv, cu_seqlens_ori_kv, batch, rows_of_keys)
    picks = None
    if cmp_sparse_indices is not None:
        check_tensor(NAME, "cmp_sparse_indices", cmp_sparse_indices, (torch.int32,), (*q.shape[:-2], 1, "K"))
        picks = cmp_sparse_indices.reshape(-1, cmp_sparse_indices.shape[-1])
    fields = metadata_fields(
        num_heads_q=q.shape[-2],
        head_dim=WIDTH,
        cmp_topk=0 if picks is None else picks.shape[1],
        cmp_ratio=cmp_ratio if cmp_kv is not None else 0,
        windows=(ori_win_left, ori_win_right),
        layouts=(layout_q, layout_kv),
        branches=(True, cmp_kv is not None),
    )
    metadata = required(NAME, "metadata", metadata, "from npu_sparse_attn_sharedkv_metadata, for the same lengths")
    check_metadata(NAME, metadata, fields, named_lengths(starts, kv_lengths))

    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    queries, results = q.reshape(-1, *q.shape[-2:]), out.view(-1, *q.shape[-2:])
    for request in range(batch):
        rows = range(starts[request], starts[request + 1])
        if len(rows) == 0:
            continue
        end = kv_lengths[request]
        first = max(end - len(rows), 0)  # the first position that a query of this request may have
        held_from = max(first - ori_win_left, 0)
        raw = window.read(request, torch.arange(held_from, end))[:, 0].float()
        pooled = None
        if entries is not None and picks is None:
            pooled = entries.read(request, torch.arange(end // cmp_ratio))[:, 0].float()
        for row in rows:
            position = end - (rows.stop - row)
            if position < 0:
                results[row] = 0
                continue
            seen = [raw[max(position - ori_win_left, 0) - held_from : position + ori_win_right + 1 - held_from]]
            visible = (position + 1) // cmp_ratio if entries is not None else 0
            if pooled is not None:
                seen.append(pooled[:visible])
            elif entries is not None and picks is not None:
                chosen = picks[row, : min(picks.shape[1], visible)].long()
                if not distinct_entries(chosen, request, visible, end // cmp_ratio):
                    continue
                seen.append(entries.read(request, chosen)[:, 0].float())
            results[row] = attended(queries[row].float(), torch.cat(seen), sinks, softmax_scale).to(q.dtype)
    return out, q.new_empty(0, dtype=torch.float32)


def attended(q: Tensor, rows: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """One query [heads, d] over rows that are key and value at once; the sink takes weight and gives nothing."""
    logits = (q @ rows.T) * scale
    highest = torch.maximum(logits.amax(1), sinks)
    weights = torch.exp(logits - highest[:, None])
    total = weights.sum(1) + torch.exp(sinks - highest)
    return (weights @ rows) / total[:, None]


def distinct_entries(chosen: Tensor, request: int, visible: int, held: int) -> bool:
    """Whether the used part of an index row is what the operator is defined for.

    -1, and what the request does not hold, is an error: on the device rows shift or stale data is read. A future entry
    or a repeated one makes the result undefined.
    """
    outside = (chosen < 0) | (chosen >= held)
    if outside.any():
        column = int(outside.nonzero()[0, 0])
        why = f"entry {int(chosen[column])} of {held}, within the used {len(chosen)} columns; valid entries come first"
        raise out_of_range(NAME, "cmp_sparse_indices", request, column, why)
    return bool((chosen < visible).all()) and len(chosen.unique()) == len(chosen)


def check_queries(q: Tensor, layout_q: str, layout_kv: str) -> None:
    """Refuse queries of a shape, dtype or layout that the operator does not take."""
    check_one_of(NAME, "layout_q", layout_q, ("TND", "BSND"))
    check_one_of(NAME, "layout_kv", layout_kv, ("PA_ND", "TND", "BSND"))
    check_layouts(NAME, layout_q, layout_kv)
    axes = ("T", "N1") if layout_q == "TND" else ("B", "S", "N1")
    check_tensor(NAME, "q", q, HALVES, (*axes, WIDTH))
    if 0 in q.shape:
        raise refusal(NAME, "q", "have no empty axis", list(q.shape), "skip the call")
    heads = q.shape[-2]
    if heads % 4 != 0 or heads > MAX_HEADS:
        raise refusal(NAME, "q heads", f"be a multiple of 4 up to {MAX_HEADS}", heads)


def check_layouts(operator: str, layout_q: str, layout_kv: str) -> None:
    """Refuse layouts that do not go together."""
    if layout_kv != "PA_ND" and layout_q != layout_kv:
        raise refusal(operator, "layout_kv", f"be PA_ND or {layout_q} with {layout_q} queries", layout_kv)


def check_modes(ori_mask_mode: int, cmp_mask_mode: int, ori_win_left: int, ori_win_right: int) -> None:
    """Refuse other masks than the band and the right-down causal one."""
    check_one_of(NAME, "ori_mask_mode", ori_mask_mode, (4,))
    check_one_of(NAME, "cmp_mask_mode", cmp_mask_mode, (3,))
    if min(ori_win_left, ori_win_right) < 0:
        raise refusal(NAME, "ori_win_left and ori_win_right", "be >= 0", (ori_win_left, ori_win_right))


def query_starts(q: Tensor, layout_q: str, cu_seqlens_q: Tensor | None, seqused_q: Tensor | None) -> list[int]:
    """Where the queries of each request start in the flat rows, and where the last one ends."""
    if layout_q == "BSND":
        if cu_seqlens_q is not None:
            raise refusal(NAME, "cu_seqlens_q", "be None with BSND queries", "a tensor")
        return [request * q.shape[1] for request in range(q.shape[0] + 1)]
    if seqused_q is not None:
        raise refusal(NAME, "seqused_q", "be None with TND queries", "a tensor")
    return prefix_sums(NAME, "cu_seqlens_q", required(NAME, "cu_seqlens_q", cu_seqlens_q), q.shape[0], "q")


def key_rows(
    prefix: str,
    q: Tensor,
    cache: Tensor,
    layout_kv: str,
    table: Tensor | None,
    sums: Tensor | None,
    batch: int,
) -> KeyRows:
    """The cache of one branch, "ori" or "cmp", once its shape fits its layout."""
    name, table_name, sums_name = f"{prefix}_kv", f"{prefix}_block_table", f"cu_seqlens_{prefix}_kv"
    axes = {"PA_ND": ("blocks", "block_size"), "TND": ("T2",), "BSND": (batch, "S2")}[layout_kv]
    check_tensor(NAME, name, cache, (q.dtype,), (*axes, 1, WIDTH))
    if layout_kv == "PA_ND":
        check_block_size(NAME, name, cache)
        table = required(NAME, table_name, table)
        check_tensor(NAME, table_name, table, (torch.int32,), (batch, "columns"))
        return KeyRows(NAME, name, cache, layout_kv, table=(table_name, table))
    if layout_kv == "TND":
        starts = prefix_sums(NAME, sums_name, required(NAME, sums_name, sums), cache.shape[0], name)
        if len(starts) != batch + 1:
            raise refusal(NAME, sums_name, f"have shape [{batch + 1}]", [len(starts)])
        return KeyRows(NAME, name, cache, layout_kv, starts=(sums_name, starts))
    return KeyRows(NAME, name, cache, layout_kv)


def key_lengths(
    layout_kv: str, seqused_kv: Tensor | None, sums: Tensor | None, batch: int, longest: int, operator: str = NAME
) -> list[int]:
    """Raw tokens of each request: given, or what packed keys or the padded shape say."""
    if seqused_kv is not None:
        return lengths_of(operator, "seqused_kv", seqused_kv, batch)
    if layout_kv == "PA_ND":
        raise refusal(operator, "seqused_kv", "be given with PA_ND keys", None)
    if layout_kv == "BSND":
        return [longest] * batch
    sums = required(operator, "cu_seqlens_ori_kv", sums)
    check_tensor(operator, "cu_seqlens_ori_kv", sums, (torch.int32,), (batch + 1,))
    return [int(length) for length in sums.diff().tolist()]


def metadata_fields(
    *,
    num_heads_q: int,
    head_dim: int,
    cmp_topk: int,
    cmp_ratio: int,
    windows: tuple[int, int],
    layouts: tuple[str, str],
    branches: tuple[bool, bool],
) -> dict[str, int | str]:
    """What the work split depends on, beside the lengths."""
    return {
        "num_heads_q": num_heads_q,
        "head_dim": head_dim,
        "cmp_topk": cmp_topk,
        "cmp_ratio": cmp_ratio,
        "ori_win_left": windows[0],
        "ori_win_right": windows[1],
        "layout_q": layouts[0],
        "layout_kv": layouts[1],
        "has_ori_kv": branches[0],
        "has_cmp_kv": branches[1],
    }


def named_lengths(starts: list[int], kv_lengths: list[int]) -> dict[str, list[int]]:
    """Query and key lengths under the names of an error text."""
    lengths = [end - start for start, end in pairwise(starts)]
    return {"query lengths": lengths, "key lengths": kv_lengths}


def attention_metadata(
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_ori_kv: Tensor | None = None,
    cu_seqlens_cmp_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    batch_size: int = 0,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    ori_topk: int = 0,
    cmp_topk: int = 0,
    cmp_ratio: int = 4,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 128,
    ori_win_right: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_ND",
    has_ori_kv: bool = True,
    has_cmp_kv: bool = True,
    device: str = "npu",
) -> Tensor:
    """The metadata operator: int32[1024] that fits one set of lengths, heads, masks and layouts.

    Not looked at: `device` (the result lies on the CPU), `seqused_q`, `cu_seqlens_cmp_kv`, and what only sizes work.
    """
    operator = f"{NAME}_metadata"
    check_one_of(operator, "num_heads_kv", num_heads_kv, (1,))
    check_one_of(operator, "layout_q", layout_q, ("TND", "BSND"))
    check_one_of(operator, "layout_kv", layout_kv, ("PA_ND", "TND", "BSND"))
    check_layouts(operator, layout_q, layout_kv)
    check_modes(ori_mask_mode, cmp_mask_mode, ori_win_left, ori_win_right)
    if has_cmp_kv:
        check_one_of(operator, "cmp_topk", cmp_topk, (0, 512, 1024))
        check_one_of(operator, "cmp_ratio", cmp_ratio, (4, 128))
    if layout_kv == "BSND":
        check_one_of(operator, "num_heads_q", num_heads_q, (32, 64), "with BSND keys")
    if layout_q == "TND":
        sums = required(operator, "cu_seqlens_q", cu_seqlens_q, "with TND queries")
        starts = prefix_sums(operator, "cu_seqlens_q", sums, 2**31, "q")
    else:
        starts = [request * max_seqlen_q for request in range(batch_size + 1)]
    kv_lengths = key_lengths(layout_kv, seqused_kv, cu_seqlens_ori_kv, len(starts) - 1, max_seqlen_kv, operator)
    fields = metadata_fields(
        num_heads_q=num_heads_q,
        head_dim=head_dim,
        cmp_topk=cmp_topk if has_cmp_kv else 0,
        cmp_ratio=cmp_ratio if has_cmp_kv else 0,
        windows=(ori_win_left, ori_win_right),
        layouts=(layout_q, layout_kv),
        branches=(has_ori_kv, has_cmp_kv),
    )
    return metadata_tensor(NAME, fields, named_lengths(starts, kv_lengths))


def attention_fake(*, q: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the operator's results."""
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(0, dtype=torch.float32)
