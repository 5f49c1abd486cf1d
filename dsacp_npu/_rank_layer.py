"""One rank's program for a layer over ranks, and running all ranks' programs in one process.

A program is a generator: wherever it needs the other ranks it yields an `Exchanged` and goes on with what that gives.
`run_together` plays all ranks and answers from `exchange`; `run_alone` is one rank of a process group and answers from
`distributed`. So both run the same code, and every rank makes the same collectives in the same order, tokens or none.

What is planned from lengths (who owns, wants and pools what) is the same on every rank, and made on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from dsacp_npu import exchange
from dsacp_npu._layer_parts import (
    Call,
    KeySide,
    carried_state,
    key_rows,
    num_computed_tokens,
    query_side,
    rows_of,
    share_of_output,
    side_of_hidden,
    side_of_rows,
    step_entries,
    step_plan,
    written_,
)
from dsacp_npu._layer_records import KeyRows, LayerBatch, LayerCache, LayerOutput, Rows
from dsacp_npu._tensors import Float, Int32, check_host, torch
from dsacp_npu.compressor import CompressorState, CompressorWeights, EntryPlan, ProjectedRows
from dsacp_npu.extents import local_extents
from dsacp_npu.partition import Partition, counted, inverse_of, partition_tokens, restored_rows, spread_rows
from dsacp_npu.visibility import pool_row_starts, window_starts


class Exchanged(NamedTuple):
    """A collective that a rank's program waits for.

    Fields:
        name: str, a function of `exchange` and of `distributed`.
        shard: what this rank brings.
        arguments: what follows, the same on every rank, as `distributed` takes it.
    """

    name: str
    shard: Any
    arguments: tuple[Any, ...] = ()


# `exchange` sees all shards and needs no counts for these.
COUNTS_ARE_SEEN = ("all_gather", "head_shards")


class Modes(NamedTuple):
    """How a layer runs over ranks."""

    split: str
    rows: str
    key_mode: str
    output_mode: str
    num_input_tokens: int | None


class StepPlan(NamedTuple):
    """What follows from the lengths of a step, the same on every rank; on the host.

    Fields:
        partition: Partition of the tokens.
        batch: LayerBatch, its lengths on the host.
        wanted: int32[count] per rank, tokens of others whose key side it needs; empty unless entries are gathered.
        owned: Partition of the step's entries; None unless entries are gathered.
    """

    partition: Partition
    batch: LayerBatch
    wanted: list[Int32]
    owned: Partition | None

    @property
    def rows_per_rank(self) -> list[int]:
        """Local rows of every rank, pad rows included."""
        return [len(tokens) for tokens in self.partition.token_indices]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.partition.restore_indices)


Program = Generator[Exchanged, Any, Any]


def run_together(programs: Sequence[Program]) -> list[Any]:
    """All ranks' results, step by step: each exchange is made once all have come to it."""
    answers: list[Any] = [None] * len(programs)
    while True:
        waiting, results = [], []
        for program, answer in zip(programs, answers, strict=True):
            try:
                waiting.append(program.send(answer))
            except StopIteration as ended:
                results.append(ended.value)
        if not waiting:
            return results
        name, _, arguments = waiting[0]
        given = () if name in COUNTS_ARE_SEEN else arguments
        answers = getattr(exchange, name)([wish.shard for wish in waiting], *given)


def run_alone(program: Program, answered: Callable[[Exchanged], Any]) -> Any:
    """One rank's result; `answered` makes the exchange with the other processes."""
    answer = None
    while True:
        try:
            answer = answered(program.send(answer))
        except StopIteration as ended:
            return ended.value


# --- planning, on the host ---


def step_plan_over_ranks(batch: LayerBatch, partition: Partition, modes: Modes, call: Call, ring_rows: int) -> StepPlan:
    """The plan of a step that has been found legal. ``ring_rows``: of the compressor's state, most of any rank."""
    if modes.key_mode != "gather_compressed":
        return StepPlan(partition, batch, [], None)
    wanted = [halo_tokens(rows_of(tokens, batch), batch, call, ring_rows) for tokens in partition.token_indices]
    owned = entry_partition(partition, batch, call.ratio) if call.weights.compressor else None
    return StepPlan(partition, batch, wanted, owned)


def planned_partition(batch: LayerBatch, cp_size: int, modes: Modes) -> Partition:
    """The split of the step's tokens; lengths on a device are refused."""
    check_host("batch.query_start_loc", batch.query_start_loc)
    check_host("batch.seq_lens", batch.seq_lens)
    return partition_tokens(batch.query_start_loc, cp_size, split=modes.split, num_input_tokens=modes.num_input_tokens)


def halo_tokens(place: Rows, batch: LayerBatch, call: Call, ring_rows: int) -> Int32:
    """The new tokens of other ranks whose key side one rank needs.

    ::

        window of each own query | rows of each entry whose last token is own | the last rows of every request
    """
    window_size, compressor = call.config.window_size, call.weights.compressor
    first_token = batch.query_start_loc[:-1]
    own = place.positions >= 0
    tokens, positions, requests = place.tokens[own], place.positions[own], place.requests[own]
    window = tokens - (positions - window_starts(positions, window_size))
    closing, pooled, pooled_rows = torch.zeros_like(positions, dtype=torch.bool), tokens[:0], 0
    if compressor is not None:
        overlap = len(compressor.wkv) > len(compressor.norm_weight)
        pooled_rows = (2 if overlap else 1) * call.ratio
        closing = (positions + 1) % call.ratio == 0
        reach = pool_row_starts(positions[closing], call.ratio, overlap=overlap)
        pooled = tokens[closing] - (positions[closing] - reach)
    live = (batch.seq_lens > 0) & (batch.query_start_loc[1:] > first_token)
    ends = batch.query_start_loc[1:][live]
    # A rollback over the ring's spare rows must find the window of the token that it goes back to.
    carried = ends - max(window_size - 1 + ring_rows - pooled_rows, ring_rows)
    owners = torch.cat([requests, requests[closing], live.nonzero()[:, 0]])
    # What lies before the step is in the caches already.
    starts = torch.cat([window, pooled, carried]).maximum(first_token[owners])
    stops = torch.cat([tokens + 1, tokens[closing] + 1, ends])
    depth = torch.zeros(int(batch.query_start_loc[-1]) + 1, dtype=torch.int64)
    depth.index_add_(0, starts.long(), torch.ones(len(starts), dtype=torch.int64))
    depth.index_add_(0, stops.long(), torch.full((len(stops),), -1))
    needed = depth.cumsum(0)[:-1] > 0
    needed[place.tokens[place.tokens >= 0]] = False
    return needed.nonzero()[:, 0].int()


def entry_partition(partition: Partition, batch: LayerBatch, compress_ratio: int) -> Partition:
    """The step's entries over ranks: each belongs to the owner of its last token."""
    computed = num_computed_tokens(batch)
    plan = step_plan(batch, compress_ratio, len(partition.restore_indices))
    requests, indices = plan.entry_requests, plan.entry_indices
    last_tokens = batch.query_start_loc[requests] + (indices + 1) * compress_ratio - 1 - computed[requests]
    owned = tuple(torch.isin(last_tokens, tokens).nonzero()[:, 0].int() for tokens in partition.token_indices)
    return Partition(owned, inverse_of(torch.cat(owned), len(requests)))


# --- one rank's program ---


def moved(value: Any, device: torch.device) -> Any:
    """A record with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return value if value is None else type(value)(*(moved(part, device) for part in value))


def rank_program(
    x: Float,
    cache: LayerCache,
    cp_rank: int,
    plan: StepPlan,
    modes: Modes,
    call: Call,
    given_topk: Int32 | None,
) -> Program:
    """One rank's step; writes into its cache. Every check that can be made before is made before."""
    tokens = plan.partition.token_indices[cp_rank]
    real = tokens >= 0
    extents = local_extents(
        plan.batch.query_start_loc,
        plan.batch.seq_lens,
        len(plan.partition.token_indices),
        cp_rank,
        split=modes.split,
        num_input_tokens=modes.num_input_tokens,
    )
    device = x.device
    batch, place = moved(plan.batch, device), moved(rows_of(tokens, plan.batch), device)
    # Pad rows of the caller's hold anything; no exchange gives them to another row, and the end fills them anew.
    own = spread_rows(x, tokens) if modes.rows == "full" else x
    side = yield from key_side(x, own, place, cp_rank, cache, batch, plan, modes, call)
    cache = written_(cache, side, batch, call)
    # Operators take queries without the pad rows that some rules put between pieces.
    real_rows = real.nonzero()[:, 0].to(device)
    place = Rows(*(part[real_rows] for part in place))
    chosen = None if given_topk is None else given_topk[place.tokens]
    weights = call.weights
    out, chosen = query_side(
        own[real_rows], place, cache, moved(extents, device), batch, call, weights.wq_b, weights.attn_sink, chosen
    )
    spread = (real.cumsum(0) - 1).masked_fill(~real, -1).int()
    output = yield from rank_output(spread_rows(out, spread), cp_rank, plan, modes, call)
    if modes.rows == "full":
        output = torch.cat([output, output.new_zeros(len(x) - len(output), output.shape[1])])
    no_choice = ~real.to(device)[:, None]
    return LayerOutput(output, spread_rows(chosen, spread).masked_fill(no_choice, -1), cache)


def key_side(
    x: Float,
    own: Float,
    place: Rows,
    cp_rank: int,
    cache: LayerCache,
    batch: LayerBatch,
    plan: StepPlan,
    modes: Modes,
    call: Call,
) -> Program:
    """What the step puts into this rank's cache."""
    if modes.key_mode == "gather_compressed":
        return (yield from side_from_own_entries(own, place, cp_rank, cache, batch, plan, call))
    everything = rows_of(counted(plan.num_tokens, place.tokens), batch)
    if modes.key_mode == "gather_kv":
        keys = key_rows(own, place, call)
        gathered = yield Exchanged("gathered_in_order", packed(keys), (plan.partition,))
        return side_of_rows(unpacked(gathered, keys), everything, cache, batch, call)
    whole = x[: plan.num_tokens]
    if modes.key_mode == "gather_hidden":
        whole = yield Exchanged("gathered_in_order", own, (plan.partition,))
    return side_of_hidden(whole, everything, cache, batch, call)


def packed(keys: KeyRows) -> torch.Tensor:
    """All of a row's key side as the bytes of one row, so that one exchange carries it, whatever its dtypes."""
    parts = [part.contiguous() for part in (keys.kv, *keys.cmp_rows, *keys.index_rows) if part.shape[1]]
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def unpacked(rows: torch.Tensor, like: KeyRows) -> KeyRows:
    """The way back from `packed`."""
    parts, start = [], 0
    for part in (like.kv, *like.cmp_rows, *like.index_rows):
        stop = start + part.shape[1] * part.element_size()
        column = rows[:, start:stop].contiguous()
        parts.append(column.view(part.dtype) if part.shape[1] else part.new_zeros(len(rows), 0))
        start = stop
    return KeyRows(parts[0], ProjectedRows(*parts[1:3]), ProjectedRows(*parts[3:5]))


def side_from_own_entries(
    own: Float, place: Rows, cp_rank: int, cache: LayerCache, batch: LayerBatch, plan: StepPlan, call: Call
) -> Program:
    """The key side when each rank pools the entries whose last token it owns.

    A rank knows its own rows, the rows that its windows and its entries reach back to, and what the next step goes on
    from. Every row that it does not know is NaN, which proves that none is read.
    """
    keys = key_rows(own, place, call)
    received = yield Exchanged("requested_rows", packed(keys), (plan.partition, plan.wanted))
    tokens = plan.partition.token_indices[cp_rank]
    real = (tokens >= 0).nonzero()[:, 0]
    known = torch.cat([tokens[real], plan.wanted[cp_rank]]).to(own.device)
    real = real.to(own.device)

    def spread(mine: Float, theirs: Float) -> Float:
        rows = mine.new_full((plan.num_tokens, mine.shape[1]), float("nan"))
        rows[known] = torch.cat([mine[real], theirs])
        return rows

    halo = unpacked(received, keys)
    cmp_rows = ProjectedRows(*map(spread, keys.cmp_rows, halo.cmp_rows))
    index_rows = ProjectedRows(*map(spread, keys.index_rows, halo.index_rows))
    side = KeySide(torch.cat([keys.kv[real], halo.kv]), rows_of(known, batch))
    weights = call.weights
    if weights.compressor is None or plan.owned is None:
        return side
    entry_plan = step_plan(batch, call.ratio, plan.num_tokens)
    entries = yield from gathered_entries(
        cmp_rows, weights.compressor, cache.cmp_state, entry_plan, cp_rank, batch, plan, call
    )
    count = len(plan.owned.restore_indices)
    side = side._replace(
        plan=entry_plan._replace(
            entry_requests=entry_plan.entry_requests[:count], entry_indices=entry_plan.entry_indices[:count]
        ),
        entries=entries,
        cmp_state=carried_state(cmp_rows, cache.cmp_state, batch, call),
    )
    if weights.indexer is None:
        return side
    index_entries = yield from gathered_entries(
        index_rows, weights.indexer.compressor, cache.index_state, entry_plan, cp_rank, batch, plan, call
    )
    return side._replace(
        index_entries=index_entries, index_state=carried_state(index_rows, cache.index_state, batch, call)
    )


def gathered_entries(
    projected: ProjectedRows,
    part: CompressorWeights,
    state: CompressorState,
    entry_plan: EntryPlan,
    cp_rank: int,
    batch: LayerBatch,
    plan: StepPlan,
    call: Call,
) -> Program:
    """All entries of the step, this rank's pooled here."""
    owned = plan.owned.token_indices[cp_rank].to(projected.kv.device)
    mine = entry_plan._replace(
        entry_requests=entry_plan.entry_requests[owned], entry_indices=entry_plan.entry_indices[owned]
    )
    entries = step_entries(projected, part, state, mine, batch, call)
    return (yield Exchanged("gathered_in_order", entries, (plan.owned,)))


def rank_output(out: Float, cp_rank: int, plan: StepPlan, modes: Modes, call: Call) -> Program:
    """The layer's output on this rank from the attention output of its own rows, pad rows included."""
    cp_size, wo_a, wo_b = len(plan.rows_per_rank), call.weights.wo_a, call.weights.wo_b
    if modes.output_mode == "all_to_all":
        heads = yield Exchanged("head_shards", out, (plan.rows_per_rank,))
        partial = share_of_output(heads, call, cp_rank, cp_size)
        if modes.rows == "scattered":
            return (yield Exchanged("reduce_scatter", partial, (plan.rows_per_rank,)))
        return (yield Exchanged("all_reduce", restored_rows(partial, plan.partition)))
    if modes.output_mode == "gather_weight":
        # Each rank keeps its groups; the full weights exist only while they are used.
        groups = [len(part) for part in torch.arange(len(wo_a)).tensor_split(cp_size)]
        kept = slice(sum(groups[:cp_rank]), sum(groups[: cp_rank + 1]))
        columns = wo_b.T.reshape(len(wo_a), -1, wo_b.shape[0])
        wo_a = yield Exchanged("all_gather", wo_a[kept], (groups,))
        columns = yield Exchanged("all_gather", columns[kept], (groups,))
        wo_b = columns.reshape(-1, wo_b.shape[0]).T
    own = call.ops.projected_output(out, wo_a, wo_b)
    if modes.rows == "scattered":
        return own
    return (yield Exchanged("gathered_in_order", own, (plan.partition,)))
