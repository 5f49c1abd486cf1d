"""Mirror of `dsacp_ref.attention` over torch. Runs on the device of its arguments and never waits for it.

Which keys a query sees depends on values. Where they are known, an operator row is computed by dense blocks, its keys
gathered once a block, and lists are gathered a few queries at a time; a block of selections takes whichever costs less.
Elsewhere every query gathers a list of the width that the shapes allow: its window, and its chosen entries or as many
as its table has room for; what it does not see is zeroed and masked.

bfloat16 and float16 are computed in float32; ``out`` is rounded once, ``lse`` stays float32. The paged forms and
`gathered_attention` are for inference: what they give carries no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from dsacp_npu._tensors import (
    Float,
    Int32,
    check_floats,
    check_tensor,
    computing_dtype,
    dtype_name,
    first_true,
    torch,
    values_known,
)
from dsacp_npu.extents import query_positions, query_rows
from dsacp_npu.paging import check_slots, flat_cache, gathered_rows, slot_mapping
from dsacp_npu.partition import counted
from dsacp_npu.visibility import visible_entries, window_starts
from dsacp_ref.spec import check_int, check_number, contract_error

__all__ = [
    "AttentionOutput",
    "all_entries_attention",
    "apply_sink",
    "gathered_attention",
    "merge_partials",
    "selected_attention",
    "window_attention",
]

QUERY_BLOCK = 32  # queries of one dense block, if their heads are few
HEAD_BLOCK = 1024  # heads of all its queries: their scores stay in the cache until they are used
KEY_BLOCK = 1024  # keys of one dense block
# What it costs to gather one key, counted in heads that meet a key which is there already. Measured with one thread,
# float32 and head_dim 512: blocks break even at 10 to 12 with 4, 8 and 16 heads, and at about 5 with 64.
GATHER_COST = 8
TAKEN_NUMBERS = 1 << 20  # numbers taken at a time where lists are known: they stay in the cache until they are used
LISTED_NUMBERS = 1 << 18  # slots looked up at a time there
GATHERED_NUMBERS = 1 << 24  # numbers gathered at a time elsewhere: few blocks, or a traced program grows long

Lists = Callable[[slice], list[Int32]]  # the lists of slots of a block of queries, one [queries, width] a cache


class AttentionOutput(NamedTuple):
    """Mirror of `dsacp_ref.attention.AttentionOutput`."""

    out: Float
    lse: Float


def gathered_attention(q: Float, keys: Float, key_indices: Int32, *, softmax_scale: float) -> AttentionOutput:
    """Mirror of `dsacp_ref.attention.gathered_attention`."""
    num_queries, _, head_dim = checked_queries(q, softmax_scale)
    check_tensor("keys", keys, (dtype_name(q),), ("num_keys", head_dim), "as wide as the queries")
    check_tensor("key_indices", key_indices, ("int32",), (num_queries, "width"), "one list a query")
    check_slots(key_indices, len(keys), "key_indices", "keys has no such row")
    return listed_attention(q, keys, key_indices, None, softmax_scale)


def listed_attention(
    q: Float, keys: Float, key_indices: Int32, attn_sink: Float | None, softmax_scale: float
) -> AttentionOutput:
    """Attention of each query over its own list of keys without pages."""
    return gathered_from(
        [keys[None]], lambda block: [key_indices[block]], key_indices.shape[1], q, attn_sink, softmax_scale
    )


def gathered_from(
    caches: list[Float], lists_of: Lists, widest: int, q: Float, attn_sink: Float | None, softmax_scale: float
) -> AttentionOutput:
    """Attention of each query over rows of several caches, which its lists name; they are ``widest`` together."""
    num_queries, _, head_dim = q.shape
    q, caches = q.detach(), [cache.detach() for cache in caches]
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=computing_dtype(q.dtype))
    if values_known(q, *caches):
        fill_from_lists(out, lse, caches, lists_of, slice(0, num_queries), widest, q, attn_sink, softmax_scale)
        return AttentionOutput(out, lse)
    step = max(1, GATHERED_NUMBERS // max(1, widest * head_dim))
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        lists = lists_of(part)
        rows = torch.cat([gathered_rows(*pair) for pair in zip(caches, lists, strict=True)], dim=1)
        out[part], lse[part] = attended(q[part], rows, torch.cat(lists, dim=1) < 0, attn_sink, softmax_scale)
    return AttentionOutput(out, lse)


def fill_from_lists(
    out: Float,
    lse: Float,
    caches: list[Float],
    lists_of: Lists,
    span: slice,
    widest: int,
    q: Float,
    attn_sink: Float | None,
    softmax_scale: float,
) -> None:
    """The same for a span of queries, few rows at a time in one buffer; what no list names is left out. On the host."""
    listed = max(1, LISTED_NUMBERS // max(1, widest))
    step = max(1, TAKEN_NUMBERS // max(1, widest * q.shape[2]))
    buffer = q.new_empty(min(step, span.stop - span.start) * widest * q.shape[2])
    flat = [flat_cache(cache) for cache in caches]
    for start in range(span.start, span.stop, listed):
        lists = lists_of(slice(start, min(start + listed, span.stop)))
        complete = not any(bool((slots < 0).any()) for slots in lists)
        for first in range(0, len(lists[0]), step):
            mine, absent = [slots[first : first + step] for slots in lists], None
            if not complete:
                mine = [slots[:, (slots >= 0).any(dim=0)] for slots in mine]  # early queries see few entries
                absent = torch.cat(mine, dim=1) < 0
                mine = [slots.clamp(min=0) for slots in mine]
            rows = taken_rows(flat, mine, buffer)
            if absent is not None:
                rows.view(-1, rows.shape[2]).index_fill_(0, absent.flatten().nonzero()[:, 0], 0)
            part = slice(start + first, start + first + len(rows))
            place = out[part] if out.dtype == lse.dtype else None
            result, lse[part] = attended(q[part], rows, absent, attn_sink, softmax_scale, place)
            if result is not place:
                out[part] = result


def taken_rows(flat: list[Float], lists: list[Int32], buffer: Float) -> Float:
    """The rows at these slots of all caches, side by side in the buffer."""
    num_queries, width, head_dim = len(lists[0]), sum(slots.shape[1] for slots in lists), flat[0].shape[1]
    rows = buffer[: num_queries * width * head_dim].view(num_queries, width, head_dim)
    first = 0
    for source, slots in zip(flat, lists, strict=True):
        last = first + slots.shape[1]
        if last > first:
            for query in range(num_queries):
                torch.index_select(source, 0, slots[query], out=rows[query, first:last])
        first = last
    return rows


def attended(
    q: Float,
    rows: Float,
    absent: torch.Tensor | None,
    attn_sink: Float | None,
    softmax_scale: float,
    place: Float | None = None,
) -> tuple[Float, Float]:
    """Output and lse of queries [t, H, D] over rows [t, n, D] of their own, or [n, D] in common; wide.

    ``absent`` [t, n] marks what a query does not see, if there is any. It must be finite all the same: 0 * NaN is NaN.
    The output over rows of their own is written to ``place``, if that is given, and is it then.
    """
    dtype = computing_dtype(q.dtype)
    q, rows = q.to(dtype), rows.to(dtype)
    num_queries, num_heads, head_dim = q.shape
    if rows.shape[-2] == 0:
        return torch.zeros_like(q), q.new_full((num_queries, num_heads), -torch.inf)
    in_common = rows.ndim == 2
    if in_common:
        logits = (q.reshape(-1, head_dim) @ rows.T).reshape(num_queries, num_heads, len(rows))
    else:
        logits = torch.bmm(q, rows.transpose(1, 2))
    logits.mul_(softmax_scale)
    if absent is not None and perhaps(absent):
        logits.masked_fill_(absent[:, None], -torch.inf)
    highest = logits.amax(dim=2, keepdim=True)
    shares = torch.softmax(logits, dim=2)
    # The share of the highest key is one over the sum of all: its logarithm costs less than the sum again.
    lse = highest - shares.amax(dim=2, keepdim=True).log()
    blind = highest == -torch.inf
    if perhaps(blind):
        shares.masked_fill_(blind, 0)
        lse.masked_fill_(blind, -torch.inf)
    if attn_sink is not None:
        shares.mul_(share_beside_sink(lse[..., 0], attn_sink.detach())[..., None])
    if in_common:
        return (shares.reshape(-1, len(rows)) @ rows).reshape(q.shape), lse[..., 0]
    return torch.bmm(shares, rows, out=place), lse[..., 0]


def perhaps(mask: torch.Tensor) -> bool:
    """Whether a mask must be applied: it has a True, or nobody knows."""
    return not values_known(mask) or bool(mask.any())


def checked_queries(q: Float, softmax_scale: float) -> tuple[int, int, int]:
    """The sizes of the query array."""
    check_floats("q", q, ("num_queries", "num_heads", "head_dim"))
    check_number("softmax_scale", softmax_scale, above=0.0, hint="head_dim ** -0.5; the operator's default is not it")
    num_queries, num_heads, head_dim = q.shape
    check_int("num_heads", num_heads, 1)
    check_int("head_dim", head_dim, 1)
    return num_queries, num_heads, head_dim


def window_attention(
    q: Float,
    swa_cache: Float,
    swa_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    attn_sink: Float,
    *,
    window_size: int,
    softmax_scale: float,
) -> AttentionOutput:
    """Mirror of `dsacp_ref.attention.window_attention`."""
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    sides = [window_side(positions, swa_cache, swa_block_table, window_size)]
    return ranged_attention(q, positions, cu_seqlens_q, sides, attn_sink, softmax_scale)


def all_entries_attention(
    q: Float,
    swa_cache: Float,
    swa_block_table: Int32,
    cmp_cache: Float,
    cmp_block_table: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    attn_sink: Float,
    *,
    compress_ratio: int,
    window_size: int,
    softmax_scale: float,
) -> AttentionOutput:
    """Mirror of `dsacp_ref.attention.all_entries_attention`.

    Limits: where values are not known, each query gathers as many entries as its table has room for, so keep tables
    narrow.
    """
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_cache("cmp_cache", cmp_cache, q)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    check_table("cmp_block_table", cmp_block_table, seqused_kv)
    compress_ratio = check_int("compress_ratio", compress_ratio, 1)
    window = window_side(positions, swa_cache, swa_block_table, window_size)
    num_visible = visible_entries(positions, compress_ratio)
    room = cmp_block_table.shape[1] * cmp_cache.shape[1]
    entries = Side(cmp_cache, cmp_block_table, torch.zeros_like(num_visible), num_visible, room)
    return ranged_attention(q, positions, cu_seqlens_q, [window, entries], attn_sink, softmax_scale)


def selected_attention(
    q: Float,
    swa_cache: Float,
    swa_block_table: Int32,
    cmp_cache: Float,
    cmp_block_table: Int32,
    topk_indices: Int32,
    cu_seqlens_q: Int32,
    seqused_kv: Int32,
    attn_sink: Float,
    *,
    compress_ratio: int,
    window_size: int,
    softmax_scale: float,
) -> AttentionOutput:
    """Mirror of `dsacp_ref.attention.selected_attention`."""
    positions = checked_call(q, swa_cache, cu_seqlens_q, seqused_kv, attn_sink, softmax_scale)
    check_cache("cmp_cache", cmp_cache, q)
    check_table("swa_block_table", swa_block_table, seqused_kv)
    check_table("cmp_block_table", cmp_block_table, seqused_kv)
    check_topk(topk_indices, visible_entries(positions, compress_ratio))
    window = window_side(positions, swa_cache, swa_block_table, window_size)
    selection = Selection(cmp_cache, cmp_block_table, topk_indices, query_rows(cu_seqlens_q, num_rows=len(q)))
    if values_known(q, swa_cache, cmp_cache, topk_indices, positions, cu_seqlens_q):
        return chosen_attention(q, positions, cu_seqlens_q, window, selection, attn_sink, softmax_scale)
    lists_of, widest = selection_lists(window, selection)
    return gathered_from([swa_cache, cmp_cache], lists_of, widest, q, attn_sink, softmax_scale)


def checked_call(
    q: Float, swa_cache: Float, cu_seqlens_q: Int32, seqused_kv: Int32, attn_sink: Float, softmax_scale: float
) -> Int32:
    """The position of every query, once what all three forms share is found legal."""
    _, num_heads, _ = checked_queries(q, softmax_scale)
    check_cache("swa_cache", swa_cache, q)
    check_floats("attn_sink", attn_sink, (num_heads,), "one sink a query head; slice it with the heads")
    return query_positions(cu_seqlens_q, seqused_kv, num_rows=len(q))


def check_cache(name: str, cache: Float, q: Float) -> None:
    """Refuse a cache of other rows than the queries can meet."""
    shape = ("num_blocks", "block_size", q.shape[2])
    check_tensor(name, cache, (dtype_name(q),), shape, "rows as wide as the queries")


def check_table(name: str, block_table: Int32, seqused_kv: Int32) -> None:
    """Refuse a table that belongs to other rows: the batch's own table, where a rank's operator rows are meant."""
    check_tensor(name, block_table, ("int32",), (len(seqused_kv), "max_blocks"), "one row an operator row")


class Picks(NamedTuple):
    """What a selection is of, for error texts."""

    one: str
    many: str
    hint: str


ENTRIES = Picks("entry", "entries", "entries count within the request, and only complete ones are visible")
TOKENS = Picks("token", "tokens", "tokens count within the request, and none after the query is visible")


def check_topk(topk_indices: Int32, num_visible: Int32, picks: Picks = ENTRIES) -> None:
    """Refuse a pick that its query may not see, or that would count twice."""
    check_tensor("topk_indices", topk_indices, ("int32",), (len(num_visible), "index_topk"), "one list a query")
    if not values_known(topk_indices, num_visible):
        return
    wrong = (topk_indices < -1) | (topk_indices >= num_visible[:, None])
    if wrong.any():
        query = first_true(wrong.any(dim=1))
        raise contract_error(
            "topk_indices",
            f"be -1 or below the {int(num_visible[query])} {picks.many} that query {query} sees",
            int(topk_indices[query][wrong[query]][0]),
            picks.hint,
        )
    ordered = topk_indices.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        query = first_true(twice.any(dim=1))
        raise contract_error(
            "topk_indices",
            "be distinct in a row",
            f"{picks.one} {int(ordered[query, 1:][twice[query]][0])} twice",
            f"query {query}",
        )


class Side(NamedTuple):
    """A paged cache, and the range of its logical rows that each query sees."""

    cache: Float
    block_table: Int32
    starts: Int32
    ends: Int32  # exclusive
    width: int  # no query sees more


def window_side(positions: Int32, swa_cache: Float, swa_block_table: Int32, window_size: int) -> Side:
    """The raw tokens, of which each query sees its window."""
    starts = window_starts(positions, window_size)
    width = min(window_size, swa_block_table.shape[1] * swa_cache.shape[1])
    if values_known(positions):  # a table that is too short for a window is found by looking up all of it
        width = int((positions - starts).max()) + 1 if len(positions) else 0
    return Side(swa_cache, swa_block_table, starts, positions + 1, width)


def side_slots(side: Side, rows: Int32, block: slice) -> Int32:
    """The slots of all that a block of queries sees, -1 where it is less than the width."""
    logical = side.starts[block, None] + counted(side.width, rows)
    wanted = torch.where(logical < side.ends[block, None], logical, -1)
    return slot_mapping(wanted, rows[block], side.block_table, side.cache.shape[1])


class Selection(NamedTuple):
    """A paged cache, and the logical rows that each query chose of it, -1 for none."""

    cache: Float
    block_table: Int32
    chosen: Int32
    rows: Int32  # the operator row of each query


def selection_slots(selection: Selection, block: slice) -> Int32:
    """The slots of all that a block of queries chose, -1 for none."""
    cache, block_table, chosen, rows = selection
    slots = slot_mapping(chosen[block], rows[block], block_table, cache.shape[1])
    check_slots(slots, cache.shape[0] * cache.shape[1])
    return slots


def selection_lists(window: Side, selection: Selection) -> tuple[Lists, int]:
    """The lists of each query's window and of its selection, and how many slots they have together."""

    def lists_of(block: slice) -> list[Int32]:
        near = side_slots(window, selection.rows, block)
        chosen = selection_slots(selection, block)
        check_slots(near, window.cache.shape[0] * window.cache.shape[1])
        return [near, chosen]

    return lists_of, window.width + selection.chosen.shape[1]


def chosen_attention(
    q: Float,
    positions: Int32,
    cu_seqlens_q: Int32,
    window: Side,
    selection: Selection,
    attn_sink: Float,
    softmax_scale: float,
) -> AttentionOutput:
    """Attention over windows and selections, by dense blocks where they cost less than lists. On the host."""
    q = q.detach()
    # Strides that rows cannot be taken from are copied here, once, rather than in every block.
    caches = [flat_cache(cache.detach()).view(cache.shape) for cache in (window.cache, selection.cache)]
    window, selection = window._replace(cache=caches[0]), selection._replace(cache=caches[1])
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=computing_dtype(q.dtype))
    lists_of, widest = selection_lists(window, selection)

    def fill(start: int, stop: int) -> None:
        fill_from_lists(out, lse, caches, lists_of, slice(start, stop), widest, q, attn_sink, softmax_scale)

    done = 0
    for row, block in query_blocks(positions, cu_seqlens_q, q.shape[1]):
        if block.stop - block.start == 1:
            continue  # shares with nobody: a decode step need not find out what it costs
        shared = entries_in_common(selection.chosen[block])
        if not sharing_pays(window, shared, block, q.shape[1]):
            continue
        fill(done, block.start)
        pieces = range_pieces(window, row, block) + entry_pieces(selection, shared, block)
        out[block], lse[block] = dense_block(q[block], pieces, attn_sink, softmax_scale)
        done = block.stop
    fill(done, len(q))
    return AttentionOutput(out, lse)


class Common(NamedTuple):
    """The entries that a block of queries chose together."""

    named: torch.Tensor  # [num_entries + 1] which they are; the last place stands for -1, and is not among them
    size: int
    most: int  # no query chose more


def entries_in_common(chosen: Int32) -> Common:
    """Where the selections [t, index_topk] of a block of queries meet."""
    most = int((chosen >= 0).sum(dim=1).max())
    named = torch.zeros(int(chosen.max()) + 2 if most else 1, dtype=torch.bool)
    named[chosen.flatten()] = True
    named[-1] = False
    return Common(named, int(named.sum()), most)


def sharing_pays(window: Side, shared: Common, block: slice, num_heads: int) -> bool:
    """Whether it costs less that all queries of a block meet all its keys than that each gathers its own."""
    first, last = block.start, block.stop - 1
    num_queries: int = last - first + 1
    in_common = int(window.ends[last] - window.starts[first]) + shared.size
    own = int(window.ends[last] - window.starts[last]) + shared.most
    return in_common * (num_queries * num_heads + GATHER_COST) < own * num_queries * (num_heads + GATHER_COST)


def ranged_attention(
    q: Float, positions: Int32, cu_seqlens_q: Int32, sides: list[Side], attn_sink: Float, softmax_scale: float
) -> AttentionOutput:
    """Attention over a range of each side."""
    if values_known(q, positions, cu_seqlens_q):
        return dense_attention(q, positions, cu_seqlens_q, sides, attn_sink, softmax_scale)
    rows = query_rows(cu_seqlens_q, num_rows=len(q))
    caches, widest = [side.cache for side in sides], sum(side.width for side in sides)
    return gathered_from(
        caches,
        lambda block: [side_slots(side, rows, block) for side in sides],
        widest,
        q,
        attn_sink,
        softmax_scale,
    )


def dense_attention(
    q: Float, positions: Int32, cu_seqlens_q: Int32, sides: list[Side], attn_sink: Float, softmax_scale: float
) -> AttentionOutput:
    """The same by blocks of consecutive queries. On the host."""
    q = q.detach()
    out = q.new_empty(q.shape)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=computing_dtype(q.dtype))
    out[positions < 0] = 0  # queries of no row, or of one without keys; blocks write all others
    for row, block in query_blocks(positions, cu_seqlens_q, q.shape[1]):
        pieces = [piece for side in sides for piece in range_pieces(side, row, block)]
        out[block], lse[block] = dense_block(q[block], pieces, attn_sink, softmax_scale)
    return AttentionOutput(out, lse)


def query_blocks(positions: Int32, cu_seqlens_q: Int32, num_heads: int) -> Iterator[tuple[int, slice]]:
    """The blocks of consecutive queries of each operator row that has keys, after the row's number."""
    size = min(QUERY_BLOCK, max(1, HEAD_BLOCK // num_heads))
    for row, (start, stop) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if start == stop or positions[start] < 0:
            continue
        for first in range(start, stop, size):
            yield row, slice(first, min(first + size, stop))


class Piece(NamedTuple):
    """Rows of one cache that a block of queries has in common."""

    cache: Float
    slots: Int32  # [n]
    hidden: torch.Tensor  # [t, n] what each query does not see


def range_pieces(side: Side, row: int, block: slice) -> list[Piece]:
    """All that a block of queries of one operator row sees of a side, in pieces of few keys."""
    pieces = []
    start, end = int(side.starts[block.start]), int(side.ends[block.stop - 1])
    for first in range(start, end, KEY_BLOCK):
        logical = counted(min(KEY_BLOCK, end - first), side.block_table) + first
        slots = slot_mapping(logical, torch.full_like(logical, row), side.block_table, side.cache.shape[1])
        hidden = (logical < side.starts[block, None]) | (logical >= side.ends[block, None])
        pieces.append(Piece(side.cache, slots, hidden))
    return pieces


def entry_pieces(selection: Selection, shared: Common, block: slice) -> list[Piece]:
    """All that a block of queries chose, in pieces of few keys."""
    chosen = selection.chosen[block]
    # One column more than there are entries: what is -1 goes there.
    columns = (shared.named.cumsum(dim=0) - 1)[chosen].masked_fill(chosen < 0, shared.size)
    slots = torch.empty(shared.size + 1, dtype=torch.int32)
    slots[columns] = selection_slots(selection, block)
    hidden = torch.ones(len(chosen), shared.size + 1, dtype=torch.bool).scatter_(1, columns, False)
    starts = range(0, shared.size, KEY_BLOCK)
    parts = [slice(start, min(start + KEY_BLOCK, shared.size)) for start in starts]
    return [Piece(selection.cache, slots[part], hidden[:, part]) for part in parts]


def dense_block(q: Float, pieces: list[Piece], attn_sink: Float, softmax_scale: float) -> tuple[Float, Float]:
    """Output and lse of a block of queries over pieces of keys that they have in common; wide."""
    q = q.to(computing_dtype(q.dtype))
    # The window joins the first entries: most layers then need one product and no merge.
    joined, others = pieces[:2], pieces[2:]
    if not others:
        return block_attention(q, *dense_keys(joined, q.dtype), attn_sink, softmax_scale)
    partials = []
    for group in (joined, *([each] for each in others)):
        partials.append(block_attention(q, *dense_keys(group, q.dtype), None, softmax_scale))
    out, lse = merge_partials(*map(torch.stack, zip(*partials, strict=True)))
    return apply_sink(out, lse, attn_sink.detach()), lse


def dense_keys(pieces: list[Piece], dtype: torch.dtype) -> tuple[Float, torch.Tensor]:
    """The rows of these pieces [n, D], and what each query of the block does not see [t, n]."""
    hidden = torch.cat([piece.hidden for piece in pieces], dim=1)
    keys = pieces[0].cache.new_empty(hidden.shape[1], pieces[0].cache.shape[2])
    first = 0
    for cache, slots, _ in pieces:
        check_slots(slots, cache.shape[0] * cache.shape[1])
        torch.index_select(flat_cache(cache.detach()), 0, slots, out=keys[first : first + len(slots)])
        first += len(slots)
    return keys.to(dtype), hidden


def block_attention(
    q: Float, keys: Float, hidden: torch.Tensor, attn_sink: Float | None, softmax_scale: float
) -> tuple[Float, Float]:
    """Attention of a block of queries over keys they have in common, some hidden from some."""
    # A row with an inf or NaN has no finite sum, and one look at sums costs less than one at all numbers. A sum that
    # merely overflows takes the longer way to the same result.
    bad = ~keys.sum(dim=1).isfinite()
    if not (bad.any() and hidden.any()):
        return attended(q, keys, hidden, attn_sink, softmax_scale)
    # A hidden NaN would reach every query of the block as 0 * NaN. Without it the others keep their bits, and those
    # that do see it are computed by themselves.
    out, lse = attended(q, keys.masked_fill(bad[:, None], 0), hidden, attn_sink, softmax_scale)
    seeing = (bad & ~hidden).any(dim=1)
    lists = torch.where(hidden, -1, counted(len(keys), keys))[seeing]
    out[seeing], lse[seeing] = listed_attention(q[seeing], keys, lists, attn_sink, softmax_scale)
    return out, lse


def merge_partials(outs: Float, lses: Float) -> AttentionOutput:
    """Mirror of `dsacp_ref.attention.merge_partials`. The lses of short numbers are float32."""
    check_floats("outs", outs, ("num_parts", "num_queries", "num_heads", "head_dim"))
    dtype = computing_dtype(outs.dtype)
    shape = tuple(outs.shape[:3])
    check_tensor("lses", lses, (str(dtype).removeprefix("torch."),), shape, "one number a part, query and head")
    check_int("num_parts", len(outs), 1)
    highest = lses.amax(dim=0)
    weights = torch.exp(lses - highest.masked_fill(highest == -torch.inf, 0))
    total = weights.sum(dim=0)
    shares = weights / torch.where(total > 0, total, 1)
    out = outs.new_zeros(outs.shape[1:], dtype=dtype)
    for share, part in zip(shares[..., None], outs, strict=True):
        out = out + torch.where(share == 0, 0, share * part.to(dtype))
    return AttentionOutput(out.to(outs.dtype), highest + total.log())


def apply_sink(out: Float, lse: Float, attn_sink: Float) -> Float:
    """Mirror of `dsacp_ref.attention.apply_sink`. The lse of short numbers is float32."""
    check_floats("out", out, ("num_queries", "num_heads", "head_dim"))
    dtype = str(computing_dtype(out.dtype)).removeprefix("torch.")
    check_tensor("lse", lse, (dtype,), tuple(out.shape[:2]), "one number a query and head")
    check_floats("attn_sink", attn_sink, (out.shape[1],), "one sink a query head; slice it with the heads")
    # What lies where no key is visible is not looked at: it may be NaN.
    share = share_beside_sink(lse, attn_sink)[..., None]
    return torch.where((lse == -torch.inf)[..., None], 0, out.to(lse.dtype) * share).to(out.dtype)


def share_beside_sink(lse: Float, attn_sink: Float) -> Float:
    """What the sink leaves of the output: ``1 / (1 + exp(sink - lse))``."""
    sink = attn_sink.to(lse.dtype)
    share = 1 / (1 + torch.exp(sink - lse))
    # -inf - -inf is nothing to compute with: no key, no output; else no sink, nothing taken.
    return share.masked_fill(sink == -torch.inf, 1).masked_fill(lse == -torch.inf, 0)
