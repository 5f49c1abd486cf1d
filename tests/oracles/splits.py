"""Which rank owns which token, found by dealing tokens out one at a time."""

from __future__ import annotations

PAD = -1


def smallest_share(total: int, parts: int) -> int:
    """The smallest c with parts * c >= total, found by counting up."""
    share = 0
    while share * parts < total:
        share += 1
    return share


def zigzag_block_sizes(q_len: int, cp_size: int) -> list[int]:
    """Sizes of the 2R blocks when tokens are dealt to them in turn: the first q mod 2R blocks end up one longer."""
    sizes = [0] * (2 * cp_size)
    for token in range(q_len):
        sizes[token % (2 * cp_size)] += 1
    return sizes


def zigzag_ceil_block_sizes(q_len: int, cp_size: int) -> list[int]:
    """Sizes of the 2R chunks when each is filled to ceil(q/2R) before the next one gets anything."""
    chunk = smallest_share(q_len, 2 * cp_size)
    sizes = [0] * (2 * cp_size)
    block = 0
    for _ in range(q_len):
        if sizes[block] == chunk:
            block += 1
        sizes[block] += 1
    return sizes


def owned_tokens(q_lens: list[int], cp_size: int, split: str, num_input_tokens: int | None = None) -> list[list[int]]:
    """Each rank's rows in local order: the global flat token index, or -1 for a pad row."""
    num_tokens = sum(q_lens)
    num_input = num_tokens if num_input_tokens is None else num_input_tokens
    if num_input < num_tokens:
        raise ValueError("num_input_tokens is smaller than the real count")
    if num_input > num_tokens and split not in ("contiguous", "round_robin"):
        raise ValueError("only the flat splits have a place for input tokens without a request")

    owned: list[list[int]] = [[] for _ in range(cp_size)]
    if split in ("contiguous", "round_robin"):
        rows_per_rank = smallest_share(num_input, cp_size)
        for place in range(rows_per_rank * cp_size):
            rank = place // rows_per_rank if split == "contiguous" else place % cp_size
            owned[rank].append(place if place < num_tokens else PAD)
        return owned

    first = 0
    for q_len in q_lens:
        for rank, offsets in enumerate(_request_offsets(q_len, cp_size, split)):
            for offset in offsets:
                owned[rank].append(first + offset if 0 <= offset < q_len else PAD)
        first += q_len
    return owned


def _request_offsets(q_len: int, cp_size: int, split: str) -> list[list[int]]:
    """Offsets inside one request that each rank carries; offsets at or beyond q_len are pad rows."""
    if split == "contiguous_request":
        share = smallest_share(q_len, cp_size)
        return [[o for o in range(q_len) if rank * share <= o < (rank + 1) * share] for rank in range(cp_size)]
    if split in ("zigzag", "zigzag_ceil", "zigzag_padded"):
        if split == "zigzag":
            sizes = zigzag_block_sizes(q_len, cp_size)
        elif split == "zigzag_ceil":
            sizes = zigzag_ceil_block_sizes(q_len, cp_size)
        else:
            sizes = [smallest_share(q_len, 2 * cp_size)] * (2 * cp_size)
        blocks = []
        offset = 0
        for size in sizes:
            blocks.append([offset + i for i in range(size)])
            offset += size
        return [blocks[rank] + blocks[2 * cp_size - 1 - rank] for rank in range(cp_size)]
    if split.startswith("round_robin_page(") and split.endswith(")"):
        page_size = int(split[len("round_robin_page(") : -1])
        pages_per_rank = smallest_share(smallest_share(q_len, page_size), cp_size)
        carried: list[list[int]] = [[] for _ in range(cp_size)]
        for page in range(pages_per_rank * cp_size):
            for place in range(page_size):
                carried[page % cp_size].append(page * page_size + place)
        return carried
    raise ValueError(f"unknown split {split!r}")


def _dealt(count: int, cp_size: int, interleave: int) -> list[int]:
    """Owners of positions 0..count-1 when runs of `interleave` positions are dealt to the ranks in turn."""
    owners: list[int] = []
    rank, in_run = 0, 0
    for _ in range(count):
        if in_run == interleave:
            rank, in_run = (rank + 1) % cp_size, 0
        owners.append(rank)
        in_run += 1
    return owners


def kv_owner(position: int, cp_size: int, interleave: int) -> int:
    """The rank that stores the key at `position` in decode context parallelism."""
    return _dealt(position + 1, cp_size, interleave)[position]


def kv_local_index(position: int, cp_size: int, interleave: int) -> int:
    """How many earlier positions the owner of `position` stores: its place in the owner's cache."""
    owners = _dealt(position + 1, cp_size, interleave)
    return sum(1 for owner in owners[:position] if owner == owners[position])


def kv_local_length(length: int, cp_size: int, rank: int, interleave: int) -> int:
    """How many of the positions 0..length-1 `rank` stores."""
    return sum(1 for owner in _dealt(length, cp_size, interleave) if owner == rank)
