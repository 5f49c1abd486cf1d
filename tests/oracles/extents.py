"""Where a token stands in its request, and the key extents of one rank, found by walking over every token."""

from __future__ import annotations

from tests.oracles import splits


def token_place(q_lens: list[int], seq_lens: list[int], token: int) -> tuple[int | None, int | None]:
    """(request, position) of a flat token; position None in a padded graph slot (seq_len 0), (None, None) for a pad."""
    walked = 0
    for request, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        if 0 < seq_len < q_len:
            raise ValueError("a request has fewer keys than queries")
        for offset in range(q_len):
            if walked == token:
                prefix = seq_len - q_len
                return request, (prefix + offset if seq_len > 0 else None)
            walked += 1
    return None, None


def positions_of_rows(cu_seqlens_q: list[int], seqused_kv: list[int]) -> list[int | None]:
    """The position of every local query when a row stands right-aligned in its key extent; None without keys."""
    positions: list[int | None] = []
    for row, extent in enumerate(seqused_kv):
        q_len = cu_seqlens_q[row + 1] - cu_seqlens_q[row]
        if 0 < extent < q_len:
            raise ValueError("a row has fewer keys than queries")
        for query in range(q_len):
            # The last query stands on the last key, the one before it on the key before.
            positions.append(extent - q_len + query if extent > 0 else None)
    return positions


def contiguous_local_lengths(
    q_lens: list[int],
    seq_lens: list[int],
    cp_size: int,
    cp_rank: int,
    num_input_tokens: int | None = None,
    causal: bool = True,
    empty_extent: str = "zero",
) -> tuple[list[int], list[int], list[int]]:
    """(local_query_start_loc, local_seq_lens, local_kv_start_loc) of one rank of the flat contiguous split.

    The extent of a request ends just after its last query on this rank. Without queries it is 0, or, for
    empty_extent="prefix", the prefix and every query of the request on this rank or an earlier one.
    """
    owned = splits.owned_tokens(q_lens, cp_size, "contiguous", num_input_tokens)
    queries = [0] * len(q_lens)
    queries_so_far = [0] * len(q_lens)
    keys_up_to_last_query = [0] * len(q_lens)
    for rank in range(cp_rank + 1):
        for token in owned[rank]:
            request, position = token_place(q_lens, seq_lens, token)
            if request is None:
                continue
            queries_so_far[request] += 1
            if rank == cp_rank:
                queries[request] += 1
                if position is not None:
                    keys_up_to_last_query[request] = position + 1

    query_start_loc, local_seq_lens, kv_start_loc = [0], [], [0]
    for request, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        if seq_len == 0:
            extent = 0
        elif queries[request] > 0:
            extent = keys_up_to_last_query[request] if causal else seq_len
        elif empty_extent == "prefix" and causal:
            extent = seq_len - q_len + queries_so_far[request]
        else:
            extent = 0
        local_seq_lens.append(extent)
        query_start_loc.append(query_start_loc[-1] + queries[request])
        kv_start_loc.append(kv_start_loc[-1] + extent)
    return query_start_loc, local_seq_lens, kv_start_loc
