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


class Halo(NamedTuple):
    """Rows that ranks need of one another, and who has them.

    Fields:
        wanted: int32[count] per rank, the tokens that it needs of others.
        rows: int64[count] per rank, its local rows that anyone needs.
        partition: Partition of these rows, end to end.
        places: int32[count] per rank, its wanted tokens as numbers of that partition.
    """

    wanted: list[Int32]
    rows: list[torch.Tensor]
    partition: Partition
    places: list[Int32]


class StepPlan(NamedTuple):
    """What follows from the lengths of a step for all layers of a ratio, the same on every rank; on the host.

    Fields:
        partition: Partition of the tokens.
        batch: LayerBatch, its lengths on the host.
        keys, pooled: Halo of the raw keys that windows reach back to, and of the rows that entries do; None unless
            entries are gathered.
        owned: Partition of the step's entries; None unless entries are gathered.
    """

    partition: Partition
    batch: LayerBatch
    keys: Halo | None = None
    pooled: Halo | None = None
    owned: Partition | None = None

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
        padded: bool, whether there are pad rows; without any, all rows are taken as they lie.
        pooled: int32[known rows], tokens whose projections the rank knows after the exchange: its own, and those it
            wants.
    """

    tokens: Int32
    real: torch.Tensor
    spread: Int32
    padded: bool
    pooled: Int32

    def real_rows(self, rows: Float | Coded) -> Float | Coded:
        """The rows without pad rows."""
        return taken(rows, self.real) if self.padded else rows

    def with_pads(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that are real, and zero in pad rows."""
        return spread_rows(rows, self.spread) if self.padded else rows


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
        return StepPlan(partition, batch)
    places = [rows_of(tokens, batch) for tokens in partition.token_indices]
    keys = halo_of([window_tokens(place, batch, kind, ring_rows) for place in places], partition)
    if kind.ratio == 1:
        return StepPlan(partition, batch, keys)
    pooled = halo_of([pooled_tokens(place, batch, kind, ring_rows) for place in places], partition)
    return StepPlan(partition, batch, keys, pooled, entry_partition(partition, batch, kind.ratio))


def rank_step(plan: StepPlan, modes: Modes, cp_rank: int, sizes: Sizes, kind: Kind, device: torch.device) -> RankStep:
    """One rank's step: what it holds, projects, writes and asks, found on the host and moved to its device."""
    tokens = plan.partition.token_indices[cp_rank]
    real = tokens >= 0
    real_rows = real.nonzero()[:, 0]
    spread = (real.cumsum(0) - 1).masked_fill(~real, -1).int()
    everything = rows_of(counted(plan.num_tokens, tokens), plan.batch)
    own, known, pooled = rows_of(tokens, plan.batch), everything, tokens[:0]
    if plan.keys is not None:
        known = rows_of(torch.cat([tokens[real_rows], plan.keys.wanted[cp_rank]]), plan.batch)
    if plan.pooled is not None:
        pooled = torch.cat([tokens[real_rows], plan.pooled.wanted[cp_rank]])
    local, batch, own, known, everything, extents, entries = moved(
        (
            LocalRows(tokens, real_rows, spread, len(real_rows) < len(tokens), pooled),
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
    queries = queries_of(Rows(*(part[local.real] for part in own)), extents, batch, sizes, kind)
    projected = everything if modes.key_mode in ("replicate", "gather_hidden") else own
    table = rope_table(projected.positions, kind.frequencies)
    geometry = Geometry(batch, projected, table, swa_slots(known, batch, sizes), entries, queries)
    return RankStep(plan, modes, cp_rank, local, geometry)


def planned_partition(batch: LayerBatch, cp_size: int, modes: Modes) -> Partition:
    """The split of the step's tokens; lengths on a device are refused."""
    check_host("batch.query_start_loc", batch.query_start_loc)
    check_host("batch.seq_lens", batch.seq_lens)
    return partition_tokens(batch.query_start_loc, cp_size, split=modes.split, num_input_tokens=modes.num_input_tokens)


def window_tokens(place: Rows, batch: LayerBatch, kind: Kind, ring_rows: int) -> Int32:
    """The new tokens of other ranks whose raw keys one rank needs.

    ::

        window of each own query | the last window of every request, and as far as a rollback may go before it
    """
    own = place.positions >= 0
    tokens, positions = place.tokens[own], place.positions[own]
    window_size = kind.config.window_size
    starts = tokens - (positions - window_starts(positions, window_size))
    spare_rows = ring_rows - ((2 if kind.overlap else 1) * kind.ratio if kind.ratio > 1 else 0)
    return needed_tokens(starts, tokens, place.requests[own], window_size - 1 + spare_rows, place, batch)


def pooled_tokens(place: Rows, batch: LayerBatch, kind: Kind, ring_rows: int) -> Int32:
    """The new tokens of other ranks whose projections one rank needs.

    ::

        rows of each entry whose last token is own | the last rows of every request, which the next step pools
    """
    closing = (place.positions >= 0) & ((place.positions + 1) % kind.ratio == 0)
    tokens, positions = place.tokens[closing], place.positions[closing]
    starts = tokens - (positions - pool_row_starts(positions, kind.ratio, overlap=kind.overlap))
    return needed_tokens(starts, tokens, place.requests[closing], ring_rows, place, batch)


def needed_tokens(
    starts: Int32, last_tokens: Int32, requests: Int32, carried: int, place: Rows, batch: LayerBatch
) -> Int32:
    """The tokens from each start to its last one, and so many last ones of every request; those of other ranks."""
    first_token = batch.query_start_loc[:-1]
    live = (batch.seq_lens > 0) & (batch.query_start_loc[1:] > first_token)
    ends = batch.query_start_loc[1:][live]
    owners = torch.cat([requests, live.nonzero()[:, 0]])
    # What lies before the step is in the caches already.
    starts = torch.cat([starts, ends - carried]).maximum(first_token[owners])
    stops = torch.cat([last_tokens + 1, ends])
    depth = torch.zeros(int(batch.query_start_loc[-1]) + 1, dtype=torch.int64)
    depth.index_add_(0, starts.long(), torch.ones(len(starts), dtype=torch.int64))
    depth.index_add_(0, stops.long(), torch.full((len(stops),), -1))
    needed = depth.cumsum(0)[:-1] > 0
    needed[place.tokens[place.tokens >= 0]] = False
    return needed.nonzero()[:, 0].int()


def halo_of(wanted: list[Int32], partition: Partition) -> Halo:
    """Who has the rows that are wanted, and which these are among all that anyone wants."""
    # One place more than tokens, which nobody asks for, is where pad rows look.
    asked = torch.zeros(len(partition.restore_indices) + 1, dtype=torch.bool)
    for tokens in wanted:
        asked[tokens] = True
    numbers = (asked.cumsum(0) - 1).int()  # of each asked token among them
    rows = [asked[tokens].nonzero()[:, 0] for tokens in partition.token_indices]
    mine = tuple(numbers[tokens[at]] for tokens, at in zip(partition.token_indices, rows, strict=True))
    held = Partition(mine, inverse_of(torch.cat(mine), int(asked.sum())))
    return Halo(wanted, rows, held, [numbers[tokens] for tokens in wanted])


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
        asking = local.real_rows(source)
    cache = written_(cache, side, geometry, call)
    chosen = None if given_topk is None else given_topk[geometry.queries.rows.tokens]
    out, chosen = query_side(local.real_rows(own), asking, geometry.queries, cache, call, chosen)
    output = yield from rank_output(local.with_pads(out), step, call)
    if len(output) < len(own if modes.rows == "scattered" else x):
        output = torch.cat([output, output.new_zeros(len(x) - len(output), output.shape[1])])
    chosen = local.with_pads(chosen).masked_fill((local.tokens < 0)[:, None], -1)
    return LayerOutput(output, chosen, cache)


def key_side(own: Float, source: Float | Coded, cache: LayerCache, step: RankStep, call: Call) -> Program:
    """What the step puts into this rank's cache, when it takes an exchange to know it."""
    key_mode, partition = step.modes.key_mode, step.plan.partition
    if key_mode == "gather_hidden":
        whole = yield Exchanged("gathered_in_order", own, (partition,))
        return side_of_hidden(whole, projection_source(whole, call), step.geometry, cache, call)
    keys = key_rows(own, source, step.geometry, call)
    if key_mode == "gather_compressed":
        return (yield from side_from_own_entries(keys, cache, step, call))
    parts = (keys.kv, *keys.cmp_rows, *keys.index_rows)
    gathered = yield Exchanged("gathered_in_order", packed(parts), (partition,))
    kv, *projected = unpacked(gathered, parts)
    keys = KeyRows(kv, ProjectedRows(*projected[:2]), ProjectedRows(*projected[2:]))
    return side_of_rows(keys, step.geometry, cache, call)


def packed(parts: Sequence[Float]) -> torch.Tensor:
    """Rows of several tensors as the bytes of one row, so that one exchange carries them, whatever their dtypes."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts if part.shape[1]], dim=1)


def unpacked(rows: torch.Tensor, like: Sequence[Float]) -> list[Float]:
    """The way back from `packed`."""
    parts, start = [], 0
    for part in like:
        stop = start + part.shape[1] * part.element_size()
        # One row counts as contiguous however far its neighbour would be; bytes of numbers must lie at their multiple.
        column = rows[:, start:stop].clone(memory_format=torch.contiguous_format)
        parts.append(column.view(part.dtype) if part.shape[1] else part.new_zeros(len(rows), 0))
        start = stop
    return parts


def side_from_own_entries(keys: KeyRows, cache: LayerCache, step: RankStep, call: Call) -> Program:
    """The key side when each rank pools the entries whose last token it owns.

    A rank knows its own rows, the rows that its windows and its entries reach back to, and what the next step goes on
    from. Every row that it does not know is NaN, which proves that none is read.
    """
    plan, local, batch, entries = step.plan, step.local, step.geometry.batch, step.geometry.entries
    assert plan.keys is not None  # of a step that gathers entries
    sent = keys.kv[plan.keys.rows[step.cp_rank].to(keys.kv.device)]
    kv = yield Exchanged("requested_rows", sent, (plan.keys.partition, plan.keys.places))
    side, weights = KeySide(torch.cat([local.real_rows(keys.kv), kv])), call.weights
    if weights.compressor is None or entries is None or plan.pooled is None:
        return side
    projected = (*keys.cmp_rows, *(keys.index_rows if weights.indexer else ()))
    rows = plan.pooled.rows[step.cp_rank].to(keys.kv.device)
    sent = packed([part[rows] for part in projected])
    halo = yield Exchanged("requested_rows", sent, (plan.pooled.partition, plan.pooled.places))

    def spread(mine: Float, theirs: Float) -> Float:
        rows = mine.new_full((plan.num_tokens, mine.shape[1]), float("nan"))
        rows[local.pooled] = torch.cat([local.real_rows(mine), theirs])
        return rows

    known = [spread(*pair) for pair in zip(projected, unpacked(halo, projected), strict=True)]
    cmp_rows = ProjectedRows(*known[:2])
    dtype = cache.swa_cache.dtype
    pooled = yield from gathered_entries(cmp_rows, weights.compressor, cache.cmp_state, dtype, entries, step, call)
    side = side._replace(entries=pooled, cmp_state=carried_state(cmp_rows, cache.cmp_state, batch, call))
    if weights.indexer is None:
        return side
    index_rows, index = ProjectedRows(*known[2:]), weights.indexer.compressor
    index_entries = yield from gathered_entries(index_rows, index, cache.index_state, dtype, entries, step, call)
    return side._replace(
        index_entries=index_entries, index_state=carried_state(index_rows, cache.index_state, batch, call)
    )


def gathered_entries(
    projected: ProjectedRows,
    part: CompressorWeights,
    state: CompressorState,
    dtype: torch.dtype,
    entries: Entries,
    step: RankStep,
    call: Call,
) -> Program:
    """All entries of the step, this rank's pooled here; they travel in the dtype of the caches that they go to."""
    partition = step.plan.owned
    assert partition is not None  # of a step that gathers entries
    owned, plan = partition.token_indices[step.cp_rank].to(projected.kv.device), entries.plan
    mine = plan._replace(entry_requests=plan.entry_requests[owned], entry_indices=plan.entry_indices[owned])
    pooled = step_entries(projected, part, state, mine, step.geometry.batch, call)
    return (yield Exchanged("gathered_in_order", pooled.to(dtype), (partition,)))


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
