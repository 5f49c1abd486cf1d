"""`compressor` in both forms and `compressor_metadata`: token by token into the state, window by window out of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.checks import HALVES, check_one_of, check_tensor, lengths_of, prefix_sums, required, table_slots
from dsacp_npu.emulator.errors import OperatorError, out_of_range, refusal

__all__ = [
    "compressor",
    "compressor_fake",
    "compressor_metadata",
    "compressor_metadata_fake",
    "two_state_compressor",
    "two_state_compressor_fake",
]

NAME = "compressor"
ROPE_DIM = 64
TRIPLES = ((4, 2, 512), (4, 2, 128), (128, 1, 512))  # documented (cmp_ratio, coff, d)
RATIOS = (2, 4, 8, 16, 32, 64, 128)  # what the host lets through
Tensor = torch.Tensor


@dataclass(frozen=True)
class State:
    """One paged state: a name, its rows, and the block table over raw positions with its name."""

    name: str
    rows: Tensor
    table_name: str
    table: Tensor

    def slots(self, request: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(block, row) of raw positions. Block ids are unsigned on the device: -1 lies far outside."""
        return table_slots(NAME, (self.name, self.rows), (self.table_name, self.table), request, positions)


@dataclass(frozen=True)
class Request:
    """The new tokens of one request: its number, first flat row, first position, their count, its first result row."""

    number: int
    row: int
    start: int
    length: int
    result: int

    def windows(self, ratio: int) -> range:
        """The windows that these tokens complete."""
        return range(self.start // ratio, (self.start + self.length) // ratio)

    def earlier(self, ratio: int, coff: int) -> Tensor:
        """The positions before these tokens that the completed windows pool from."""
        first = max(0, (self.start // ratio - (coff - 1)) * ratio)
        return torch.arange(first, self.start if len(self.windows(ratio)) else first)

    def positions(self) -> Tensor:
        """The positions of the tokens."""
        return torch.arange(self.start, self.start + self.length)


def compressor(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    state_cache: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    state_block_table: Tensor | None,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    start_pos: Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    cache_mode: int,
) -> Tensor:
    """The operator with one state: keys in the first half of a row, scores with their bias in the second.

    Rows of the result that no window fills are NaN. So is everything for scalars that the host lets through though
    nobody documents them: other ratios, sizes, and rotary_mode 1.
    """
    check_one_of(NAME, "cache_mode", cache_mode, (1,))
    scalars = (rope_head_dim, cmp_ratio, coff, norm_eps, rotary_mode)
    check_scalars(scalars)
    width = coff * norm_weight.shape[0]
    check_state(NAME, "state_cache", state_cache, 2 * width)
    table = required(NAME, "state_block_table", state_block_table)
    kv, score = state_cache[..., :width], state_cache[..., width:]
    states = tuple(State("state_cache", half, "state_block_table", table) for half in (kv, score))
    return compressed(
        x, (wkv, wgate, ape, norm_weight), states, (rope_sin, rope_cos), (cu_seqlens, seqused, start_pos), scalars
    )


def two_state_compressor(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    kv_state: Tensor,
    score_state: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_block_table: Tensor | None,
    score_block_table: Tensor | None,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    start_pos: Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    enable_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The older operator: two states with a block table each, and four more results, empty without gradients."""
    check_one_of(NAME, "enable_grad", enable_grad, (False,), "training is not emulated")
    scalars = (rope_head_dim, cmp_ratio, coff, norm_eps, rotary_mode)
    check_scalars(scalars)
    states = []
    for name, rows, table in (("kv", kv_state, kv_block_table), ("score", score_state, score_block_table)):
        check_state(NAME, f"{name}_state", rows, coff * norm_weight.shape[0])
        states.append(State(f"{name}_state", rows, f"{name}_block_table", required(NAME, f"{name}_block_table", table)))
    entries = compressed(
        x,
        (wkv, wgate, ape, norm_weight),
        tuple(states),
        (rope_sin, rope_cos),
        (cu_seqlens, seqused, start_pos),
        scalars,
    )
    return entries, *(x.new_empty(0) for _ in range(4))  # type: ignore[return-value]


def check_state(operator: str, name: str, rows: Tensor, width: int) -> None:
    """Refuse a state that is not fp32 in pages of rows of this width."""
    check_tensor(operator, name, rows, (torch.float32,), ("blocks", "block_size", width))
    if rows.shape[0] and not rows[0].is_contiguous():
        raise refusal(operator, name, "be contiguous within a block", f"strides {rows.stride()}")


def compressed(
    x: Tensor,
    weights: tuple[Tensor, ...],
    states: tuple[State, ...],
    ropes: tuple[Tensor, Tensor],
    lengths: tuple[Tensor | None, ...],
    scalars: tuple[int, int, int, float, int],
) -> Tensor:
    """Entries of every window that ends in this call, packed; the states take up every new token."""
    _, ratio, coff, eps, rotary_mode = scalars
    wkv, wgate, ape, norm_weight = weights
    d = norm_weight.shape[0]
    check_weights(x, weights, ratio, coff)
    requests, shape = new_tokens(x, lengths, ratio)
    batch = x.shape[0] if x.ndim == 3 else len(requests)
    for state in states:
        check_tensor(NAME, state.table_name, state.table, (torch.int32,), (batch, "columns"))
    for name, table in zip(("rope_sin", "rope_cos"), ropes, strict=True):
        check_tensor(NAME, name, table, (x.dtype, torch.float32), (*shape, ROPE_DIM))
    sin, cos = (table.reshape(-1, ROPE_DIM).float() for table in ropes)
    check_order(states, requests, ratio, coff)

    flat = x.reshape(-1, x.shape[-1]).float()
    fresh = flat @ wkv.float().T, flat @ wgate.float().T
    for request in requests:
        rows = slice(request.row, request.row + request.length)
        fresh[1][rows] += ape[request.positions() % ratio]
    known = (ratio, coff, d) in TRIPLES and rotary_mode == 2
    out = x.new_full((*shape, d), torch.nan)
    results = out.view(-1, d)
    for request in requests if known else ():
        kv, score = (held_and_new(state, new, request, ratio, coff) for state, new in zip(states, fresh, strict=True))
        for row, window in enumerate(request.windows(ratio), request.result):
            entry = rms_normed(
                pooled(kv, score, window - request.windows(ratio)[0], window, ratio, d), norm_weight, eps
            )
            results[row] = rotated(entry, cos[row], sin[row]).to(x.dtype)
    for state, new in zip(states, fresh, strict=True):
        for request in requests:
            store(state, new if known else torch.full_like(new, torch.nan), request)
    return out


def check_scalars(scalars: tuple[int, int, int, float, int]) -> None:
    """Refuse scalars that the host refuses; it lets more through than is documented."""
    rope_head_dim, ratio, coff, _, rotary_mode = scalars
    check_one_of(NAME, "rope_head_dim", rope_head_dim, (ROPE_DIM,))
    check_one_of(NAME, "cmp_ratio", ratio, RATIOS)
    check_one_of(NAME, "coff", coff, (1, 2))
    check_one_of(NAME, "rotary_mode", rotary_mode, (1, 2))


def check_weights(x: Tensor, weights: tuple[Tensor, ...], ratio: int, coff: int) -> None:
    """Refuse rows and weights whose dtypes or shapes do not go together."""
    wkv, wgate, ape, norm_weight = weights
    check_tensor(NAME, "x", x, HALVES, ("T", "hidden") if x.ndim == 2 else ("B", "S", "hidden"))
    hidden = x.shape[-1]
    if hidden % 512 != 0 or not 1024 <= hidden <= 10240:
        raise refusal(NAME, "x hidden", "be a multiple of 512 in 1024..10240", hidden)
    check_tensor(NAME, "norm_weight", norm_weight, (x.dtype,), ("d",))
    d = norm_weight.shape[0]
    check_one_of(NAME, "norm_weight size", d, (128, 512))
    check_tensor(NAME, "wkv", wkv, (x.dtype,), (coff * d, hidden))
    check_tensor(NAME, "wgate", wgate, (x.dtype,), (coff * d, hidden))
    check_tensor(NAME, "ape", ape, (torch.float32,), (ratio, coff * d))


def new_tokens(x: Tensor, lengths: tuple[Tensor | None, ...], ratio: int) -> tuple[list[Request], tuple[int, ...]]:
    """The requests, and the shape of the rows of the result."""
    cu_seqlens, seqused, start_pos = lengths
    if x.ndim == 3:
        if cu_seqlens is not None:
            raise refusal(NAME, "cu_seqlens", "be None with x [B, S, hidden]", "a tensor")
        offsets = [request * x.shape[1] for request in range(x.shape[0] + 1)]
    else:
        offsets = prefix_sums(NAME, "cu_seqlens", required(NAME, "cu_seqlens", cu_seqlens), x.shape[0], "x")
    batch = len(offsets) - 1
    whole = [end - start for start, end in pairwise(offsets)]
    used = whole if seqused is None else lengths_of(NAME, "seqused", seqused, batch)
    starts = [0] * batch
    if start_pos is not None:
        check_tensor(NAME, "start_pos", start_pos, (torch.int32,), (batch,))
        starts = [int(start) for start in start_pos.tolist()]
    shape = (min(x.shape[0], x.shape[0] // ratio + batch),) if x.ndim == 2 else (batch, -(-x.shape[1] // ratio))
    requests, result = [], 0
    for number in range(batch):
        if used[number] > whole[number]:
            raise out_of_range(NAME, "x", number, used[number] - 1, f"seqused passes its {whole[number]} rows")
        if starts[number] < 0 and used[number] > 0:
            raise out_of_range(NAME, "start_pos", number, starts[number], "a negative position")
        first = number * shape[1] if x.ndim == 3 else result
        requests.append(Request(number, offsets[number], max(starts[number], 0), used[number], first))
        result += len(requests[-1].windows(ratio))
    return requests, shape


def check_order(states: tuple[State, ...], requests: list[Request], ratio: int, coff: int) -> None:
    """Refuse what depends on the order in which cores run: a slot written twice, or written and read.

    Every slot is looked up here, so that nothing is written before all of them are known to exist.
    """
    for state in states:
        reads, writes = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        for request in requests:
            block, offset = state.slots(request.number, request.earlier(ratio, coff))
            reads = torch.cat([reads, block * state.rows.shape[1] + offset])
            block, offset = state.slots(request.number, request.positions())
            writes = torch.cat([writes, (block * state.rows.shape[1] + offset)[block != 0]])
        if len(writes.unique()) < len(writes) or torch.isin(reads, writes).any():
            raise OperatorError(
                f"{NAME}: {state.table_name} must give every position of a call a slot of its own: a slot is written "
                "twice, or read and written; the order is undefined"
            )


def held_and_new(state: State, new: Tensor, request: Request, ratio: int, coff: int) -> Tensor:
    """The rows of a request from the first that is pooled: out of the state, then out of this call."""
    held = state.rows[state.slots(request.number, request.earlier(ratio, coff))]
    return torch.cat([held, new[request.row : request.row + request.length]])


def pooled(kv: Tensor, score: Tensor, place: int, window: int, ratio: int, d: int) -> Tensor:
    """The mean of one window's slots, weighted by a softmax over slots for every channel by itself.

    `place` counts windows from the first of the call. With overlap, the window before gives its first channels; before
    window 0 there is none.
    """
    overlap = kv.shape[1] == 2 * d
    before = 1 if overlap and window - place > 0 else 0  # kv then starts with the window before the first of the call
    own = slice((place + before) * ratio, (place + before + 1) * ratio)
    values, scores = kv[own, -d:], score[own, -d:]
    if overlap and window > 0:
        previous = slice(own.start - ratio, own.start)
        values = torch.cat([kv[previous, :d], values])
        scores = torch.cat([score[previous, :d], scores])
    weights = torch.exp(scores - scores.amax(0))
    return (weights * values).sum(0) / weights.sum(0)


def rms_normed(entry: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of one row, float32."""
    return entry / torch.sqrt((entry * entry).mean() + eps) * weight.float()


def rotated(entry: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last channels turned in adjacent pairs; every angle stands twice in the tables."""
    tail = entry[-ROPE_DIM:]
    turned = torch.stack([-tail[1::2], tail[0::2]], dim=1).flatten()
    return torch.cat([entry[:-ROPE_DIM], tail * cos + turned * sin])


def store(state: State, new: Tensor, request: Request) -> None:
    """Write the new rows of a request to their slots; block 0 means not to."""
    block, offset = state.slots(request.number, request.positions())
    kept = block != 0
    state.rows[block[kept], offset[kept]] = new[request.row : request.row + request.length][kept]


def compressor_metadata(
    rope_cos: Tensor,
    rope_sin: Tensor,
    cu_seqlens: Tensor,
    start_pos: Tensor,
    kv_block_table: Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_compressed_tokens: int,
    num_reqs_actual: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(cos, sin, slots) of every result row of a compressor call.

    Padding rows, negative blocks, and what passes the end of a table give cos 1, sin 0 and slot -1, without an error.
    """
    operator = "compressor_metadata"
    check_one_of(operator, "slot_mapping_format", slot_mapping_format, (1, 2))
    for name, value in (
        ("num_compressed_tokens", num_compressed_tokens),
        ("num_reqs_actual", num_reqs_actual),
        ("kv_block_size", kv_block_size),
        ("compress_ratio", compress_ratio),
    ):
        if value < 1:
            raise refusal(operator, name, "be >= 1", value)
    batch = cu_seqlens.shape[0] - 1
    check_tensor(operator, "cu_seqlens", cu_seqlens, (torch.int32,), ("batch + 1",))
    check_tensor(operator, "start_pos", start_pos, (torch.int32,), (batch,))
    check_tensor(operator, "kv_block_table", kv_block_table, (torch.int32,), (batch, "columns"))
    if num_reqs_actual > batch:
        raise out_of_range(operator, "cu_seqlens", num_reqs_actual - 1, batch, f"it holds {batch} requests")
    tables = [table.reshape(-1, ROPE_DIM) for table in (rope_cos, rope_sin)]
    cos = rope_cos.new_ones(num_compressed_tokens, 1, 1, ROPE_DIM)
    sin = rope_sin.new_zeros(num_compressed_tokens, 1, 1, ROPE_DIM)
    slots = torch.tensor([[-1, kv_block_size - 1]], dtype=torch.int32).repeat(num_compressed_tokens, 1)
    row = 0
    for request in range(num_reqs_actual):
        start, length = int(start_pos[request]), int(cu_seqlens[request + 1] - cu_seqlens[request])
        if start < 0 or length <= 0:
            continue
        for window in range(start // compress_ratio, (start + length) // compress_ratio):
            if row == num_compressed_tokens:
                break
            column, offset = divmod(window, kv_block_size)
            block = int(kv_block_table[request, column]) if column < kv_block_table.shape[1] else -1
            if block >= 0 and window * compress_ratio < len(tables[0]):
                cos[row, 0, 0], sin[row, 0, 0] = (table[window * compress_ratio] for table in tables)
                slots[row, 0], slots[row, 1] = block, offset
            row += 1
    return cos, sin, slots if slot_mapping_format == 2 else slots[:, 0] * kv_block_size + slots[:, 1]


def compressor_fake(
    *, x: Tensor, norm_weight: Tensor, cu_seqlens: Tensor | None, cmp_ratio: int, **_: object
) -> Tensor:
    """Shape and dtype of the entries."""
    if x.ndim == 3:
        rows: tuple[int, ...] = (x.shape[0], -(-x.shape[1] // cmp_ratio))
    else:
        assert cu_seqlens is not None
        rows = (min(x.shape[0], x.shape[0] // cmp_ratio + cu_seqlens.shape[0] - 1),)
    return x.new_empty((*rows, norm_weight.shape[0]))


def two_state_compressor_fake(**arguments: object) -> tuple[Tensor, ...]:
    """Shapes and dtypes of the entries and of the four empty results."""
    entries = compressor_fake(**arguments)  # type: ignore[arg-type]
    return entries, *(entries.new_empty(0) for _ in range(4))


def compressor_metadata_fake(
    *, rope_cos: Tensor, rope_sin: Tensor, slot_mapping_format: int, num_compressed_tokens: int, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of tables and slots."""
    shape = (num_compressed_tokens, 1, 1, ROPE_DIM)
    slots = (num_compressed_tokens, 2) if slot_mapping_format == 2 else (num_compressed_tokens,)
    return rope_cos.new_empty(shape), rope_sin.new_empty(shape), rope_cos.new_empty(slots, dtype=torch.int32)
