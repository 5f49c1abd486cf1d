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
from dsacp_npu._geometry import (
    Entries,
    Geometry,
    Kind,
    Sizes,
    entries_of,
    moved,
    num_computed_tokens,
    queries_of,
    rows_of,
    swa_slots,
    used_part,
)
from dsacp_npu._layer_parts import (
    Call,
    Coded,
    KeySide,
    carried_state,
    key_rows,
    output_rows,
    projection_source,
    query_side,
    side_of_hidden,
    side_of_rows,
    step_entries,
    taken,
    written_,
)
from dsacp_npu._layer_records import KeyRows, LayerBatch, LayerCache, LayerOutput, Rows
from dsacp_npu._tensors import Float, Int32, check_host, torch
from dsacp_npu.compressor import CompressorState, CompressorWeights, ProjectedRows, emitted_entries
from dsacp_npu.extents import local_extents
from dsacp_npu.partition import Partition, counted, inverse_of, partition_tokens, restored_rows, spread_rows
from dsacp_npu.quant import QuantizedWeight
from dsacp_npu.rope import rope_table
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
    """What follows from the lengths of a step for all layers of a ratio, the same on every rank; on the host.

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


class LocalRows(NamedTuple):
    """One rank's rows of a step; on the device.

    Fields:
        tokens: int32[local rows], global tokens, -1 in pad rows.
        real: int64[real rows], the local rows that are none.
        spread: int32[local rows], the place of each row among the real ones, -1 in pad rows.
        known: int32[known rows], tokens whose key side the rank knows after the exchange: its own, and those it wants.
    """

    tokens: Int32
    real: torch.Tensor
    spread: Int32
    known: Int32


class RankStep(NamedTuple):
    """A step over ranks as one of them sees it, for all layers of a ratio.

    Fields:
        plan: StepPlan, on the host, the same on every rank.
        modes: Modes.
        cp_rank: int.
        local: LocalRows.
        geometry: Geometry.
    """

    plan: StepPlan
    modes: Modes
    cp_rank: int
    local: LocalRows
    geometry: Geometry


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


def step_plan_over_ranks(batch: LayerBatch, partition: Partition, modes: Modes, kind: Kind, ring_rows: int) -> StepPlan:
    """The plan of a step that has been found legal. ``ring_rows``: of the compressor's state, most of any rank."""
    if modes.key_mode != "gather_compressed":
        return StepPlan(partition, batch, [], None)
    wanted = [halo_tokens(rows_of(tokens, batch), batch, kind, ring_rows) for tokens in partition.token_indices]
    owned = entry_partition(partition, batch, kind.ratio) if kind.ratio > 1 else None
    return StepPlan(partition, batch, wanted, owned)


def rank_step(plan: StepPlan, modes: Modes, cp_rank: int, sizes: Sizes, kind: Kind, device: torch.device) -> RankStep:
    """One rank's step: what it holds, projects, writes and asks, found on the host and moved to its device."""
    tokens = plan.partition.token_indices[cp_rank]
    real = tokens >= 0
    real_rows = real.nonzero()[:, 0]
    spread = (real.cumsum(0) - 1).masked_fill(~real, -1).int()
    everything = rows_of(counted(plan.num_tokens, tokens), plan.batch)
    own, known = rows_of(tokens, plan.batch), everything
    if modes.key_mode == "gather_compressed":
        known = rows_of(torch.cat([tokens[real_rows], plan.wanted[cp_rank]]), plan.batch)
    local, batch, own, known, everything, extents, entries = moved(
        (
            LocalRows(tokens, real_rows, spread, known.tokens),
            plan.batch,
            own,
            known,
            everything,
            local_extents(
                plan.batch.query_start_loc,
                plan.batch.seq_lens,
                len(plan.partition.token_indices),
                cp_rank,
                split=modes.split,
                num_input_tokens=modes.num_input_tokens,
            ),
            entries_of(plan.batch, plan.num_tokens, sizes, kind),
        ),
        device,
    )
    # Operators take queries without the pad rows that some rules put between pieces.
    queries = queries_of(Rows(*(part[local.real] for part in own)), extents, batch, kind)
    projected = everything if modes.key_mode in ("replicate", "gather_hidden") else own
    table = rope_table(projected.positions, kind.frequencies)
    geometry = Geometry(batch, projected, table, swa_slots(known, batch, sizes), entries, queries)
    return RankStep(plan, modes, cp_rank, local, geometry)


def planned_partition(batch: LayerBatch, cp_size: int, modes: Modes) -> Partition:
    """The split of the step's tokens; lengths on a device are refused."""
    check_host("batch.query_start_loc", batch.query_start_loc)
    check_host("batch.seq_lens", batch.seq_lens)
    return partition_tokens(batch.query_start_loc, cp_size, split=modes.split, num_input_tokens=modes.num_input_tokens)


def halo_tokens(place: Rows, batch: LayerBatch, kind: Kind, ring_rows: int) -> Int32:
    """The new tokens of other ranks whose key side one rank needs.

    ::

        window of each own query | rows of each entry whose last token is own | the last rows of every request
    """
    window_size = kind.config.window_size
    first_token = batch.query_start_loc[:-1]
    own = place.positions >= 0
    tokens, positions, requests = place.tokens[own], place.positions[own], place.requests[own]
    window = tokens - (positions - window_starts(positions, window_size))
    closing, pooled, pooled_rows = torch.zeros_like(positions, dtype=torch.bool), tokens[:0], 0
    if kind.ratio > 1:
        pooled_rows = (2 if kind.overlap else 1) * kind.ratio
        closing = (positions + 1) % kind.ratio == 0
        reach = pool_row_starts(positions[closing], kind.ratio, overlap=kind.overlap)
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
    num_rows = len(partition.restore_indices)
    plan = used_part(emitted_entries(batch.query_start_loc, computed, compress_ratio, num_rows=num_rows))
    requests, indices = plan.entry_requests, plan.entry_indices
    last_tokens = batch.query_start_loc[requests] + (indices + 1) * compress_ratio - 1 - computed[requests]
    owned = tuple(torch.isin(last_tokens, tokens).nonzero()[:, 0].int() for tokens in partition.token_indices)
    return Partition(owned, inverse_of(torch.cat(owned), len(requests)))


# --- one rank's program ---


def rank_program(x: Float, cache: LayerCache, step: RankStep, call: Call, given_topk: Int32 | None) -> Program:
    """One rank's step; writes into its cache. Every check that can be made before is made before."""
    local, modes, geometry = step.local, step.modes, step.geometry
    # Pad rows of the caller's hold anything; no exchange gives them to another row, and the end fills them anew.
    own = spread_rows(x, local.tokens) if modes.rows == "full" else x
    if modes.key_mode == "replicate":
        whole = x[: step.plan.num_tokens]
        source = projection_source(whole, call)
        side = side_of_hidden(whole, source, geometry, cache, call)
        asking = taken(source, geometry.queries.rows.tokens)
    else:
        source = projection_source(own, call)
        side = yield from key_side(own, source, cache, step, call)
        asking = taken(source, local.real)
    cache = written_(cache, side, geometry, call)
    chosen = None if given_topk is None else given_topk[geometry.queries.rows.tokens]
    out, chosen = query_side(own[local.real], asking, geometry.queries, cache, call, chosen)
    output = yield from rank_output(spread_rows(out, local.spread), step, call)
    if modes.rows == "full":
        output = torch.cat([output, output.new_zeros(len(x) - len(output), output.shape[1])])
    no_choice = (local.tokens < 0)[:, None]
    return LayerOutput(output, spread_rows(chosen, local.spread).masked_fill(no_choice, -1), cache)


def key_side(own: Float, source: Float | Coded, cache: LayerCache, step: RankStep, call: Call) -> Program:
    """What the step puts into this rank's cache, when it takes an exchange to know it."""
    key_mode, partition = step.modes.key_mode, step.plan.partition
    if key_mode == "gather_hidden":
        whole = yield Exchanged("gathered_in_order", own, (partition,))
        return side_of_hidden(whole, projection_source(whole, call), step.geometry, cache, call)
    keys = key_rows(own, source, step.geometry, call)
    if key_mode == "gather_compressed":
        return (yield from side_from_own_entries(keys, cache, step, call))
    gathered = yield Exchanged("gathered_in_order", packed(keys), (partition,))
    return side_of_rows(unpacked(gathered, keys), step.geometry, cache, call)


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


def side_from_own_entries(keys: KeyRows, cache: LayerCache, step: RankStep, call: Call) -> Program:
    """The key side when each rank pools the entries whose last token it owns.

    A rank knows its own rows, the rows that its windows and its entries reach back to, and what the next step goes on
    from. Every row that it does not know is NaN, which proves that none is read.
    """
    plan, local, batch, entries = step.plan, step.local, step.geometry.batch, step.geometry.entries
    received = yield Exchanged("requested_rows", packed(keys), (plan.partition, plan.wanted))

    def spread(mine: Float, theirs: Float) -> Float:
        rows = mine.new_full((plan.num_tokens, mine.shape[1]), float("nan"))
        rows[local.known] = torch.cat([mine[local.real], theirs])
        return rows

    halo = unpacked(received, keys)
    side, weights = KeySide(torch.cat([keys.kv[local.real], halo.kv])), call.weights
    if weights.compressor is None or entries is None:
        return side
    cmp_rows = ProjectedRows(*map(spread, keys.cmp_rows, halo.cmp_rows))
    pooled = yield from gathered_entries(cmp_rows, weights.compressor, cache.cmp_state, entries, step, call)
    side = side._replace(entries=pooled, cmp_state=carried_state(cmp_rows, cache.cmp_state, batch, call))
    if weights.indexer is None:
        return side
    index_rows, index = ProjectedRows(*map(spread, keys.index_rows, halo.index_rows)), weights.indexer.compressor
    index_entries = yield from gathered_entries(index_rows, index, cache.index_state, entries, step, call)
    return side._replace(
        index_entries=index_entries, index_state=carried_state(index_rows, cache.index_state, batch, call)
    )


def gathered_entries(
    projected: ProjectedRows,
    part: CompressorWeights,
    state: CompressorState,
    entries: Entries,
    step: RankStep,
    call: Call,
) -> Program:
    """All entries of the step, this rank's pooled here."""
    partition = step.plan.owned
    assert partition is not None  # of a step that gathers entries
    owned, plan = partition.token_indices[step.cp_rank].to(projected.kv.device), entries.plan
    mine = plan._replace(entry_requests=plan.entry_requests[owned], entry_indices=plan.entry_indices[owned])
    pooled = step_entries(projected, part, state, mine, step.geometry.batch, call)
    return (yield Exchanged("gathered_in_order", pooled, (partition,)))


def rank_output(out: Float, step: RankStep, call: Call) -> Program:
    """The layer's output on this rank from the attention output of its own rows, pad rows included."""
    plan, modes, wo_a, wo_b = step.plan, step.modes, call.weights.wo_a, call.weights.wo_b
    if modes.output_mode == "all_to_all":
        heads = yield Exchanged("head_shards", out, (plan.rows_per_rank,))
        partial = output_rows(heads, wo_a, wo_b, call)
        if modes.rows == "scattered":
            return (yield Exchanged("reduce_scatter", partial, (plan.rows_per_rank,)))
        return (yield Exchanged("all_reduce", restored_rows(partial, plan.partition)))
    if modes.output_mode == "gather_weight":
        wo_a, wo_b = yield from gathered_weights(wo_a, wo_b, len(plan.rows_per_rank), call.kind)
    own = output_rows(out, wo_a, wo_b, call)
    if modes.rows == "scattered":
        return own
    return (yield Exchanged("gathered_in_order", own, (plan.partition,)))


def gathered_weights(wo_a: Float, wo_b: Float | QuantizedWeight, cp_size: int, kind: Kind) -> Program:
    """The full output weights from every rank's groups; they exist only while they are used."""
    groups = groups_per_rank(kind.config.o_groups, cp_size)
    part = wo_b.values if isinstance(wo_b, QuantizedWeight) else wo_b
    columns = part.T.reshape(*wo_a.shape[:2], part.shape[0])
    wo_a = yield Exchanged("all_gather", wo_a, (groups,))
    columns = yield Exchanged("all_gather", columns, (groups,))
    whole = columns.reshape(-1, part.shape[0]).T
    return wo_a, QuantizedWeight(whole, wo_b.scales) if isinstance(wo_b, QuantizedWeight) else whole


def groups_per_rank(o_groups: int, cp_size: int) -> list[int]:
    """How many groups each rank keeps where weights are gathered; the first ranks keep one more."""
    least, more = divmod(o_groups, cp_size)
    return [least + (rank < more) for rank in range(cp_size)]
