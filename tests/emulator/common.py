"""Legal calls of the operators, to be broken in one place by a test."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

SCALE = 512**-0.5
ATTENTION_METADATA = (
    "cu_seqlens_q",
    "cu_seqlens_ori_kv",
    "seqused_kv",
    "cmp_ratio",
    "ori_mask_mode",
    "cmp_mask_mode",
    "ori_win_left",
    "ori_win_right",
    "layout_q",
    "layout_kv",
)
NO_LIMIT = 2**63 - 1


def ops(namespace: str = "_C_ascend") -> Any:
    """The operators of a namespace."""
    return getattr(torch.ops, namespace)


def int32(*values: int) -> torch.Tensor:
    """A row of integers."""
    return torch.tensor(values, dtype=torch.int32)


def sums(lengths: list[int]) -> torch.Tensor:
    """Prefix sums, with the leading 0."""
    return int32(*accumulate(lengths, initial=0))


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=generator).to(dtype)


def pages(generator: torch.Generator, rows: list[int], block_size: int, spare: int = 2) -> tuple[torch.Tensor, int]:
    """(block table, blocks of the cache): shuffled blocks, block 0 for nobody, -7 where a request needs no block."""
    counts = [-(-count // block_size) for count in rows]
    blocks = 1 + sum(counts) + spare
    ids = iter((1 + torch.randperm(blocks - 1, generator=generator)).tolist())
    table = torch.full((len(rows), max([*counts, 1]) + 1), -7, dtype=torch.int32)
    for request, count in enumerate(counts):
        for column in range(count):
            table[request, column] = next(ids)
    return table, blocks


def attention_case(
    ratio: int,
    queries: list[int],
    keys: list[int],
    *,
    heads: int = 4,
    topk: int = 512,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    padding: int = 0,
) -> dict[str, Any]:
    """Arguments of a legal attention call: TND queries, paged keys; indices for ratio 4."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(queries)
    table, blocks = pages(generator, keys, block_size)
    case: dict[str, Any] = {
        "q": normal(generator, tokens + padding, heads, 512, dtype=dtype),
        "ori_kv": normal(generator, blocks, block_size, 1, 512, dtype=dtype),
        "ori_block_table": table,
        "cu_seqlens_q": sums(queries),
        "seqused_kv": int32(*keys),
        "sinks": torch.randn(heads, generator=generator),
        "softmax_scale": SCALE,
        "cmp_ratio": ratio,
        "ori_win_left": 127,
        "layout_q": "TND",
    }
    if ratio == 1:
        return case
    table, blocks = pages(generator, [key // ratio for key in keys], block_size)
    case["cmp_kv"] = normal(generator, blocks, block_size, 1, 512, dtype=dtype)
    case["cmp_block_table"] = table
    if ratio == 4:
        case["cmp_sparse_indices"] = torch.full((tokens + padding, 1, topk), -1, dtype=torch.int32)
        for row, position in enumerate(positions_of(queries, keys)):
            visible = max((position + 1) // 4, 0)
            chosen = torch.randperm(visible, generator=generator)[:topk]
            case["cmp_sparse_indices"][row, 0, : len(chosen)] = chosen.int()
    return case


def positions_of(queries: list[int], keys: list[int]) -> list[int]:
    """The position of every query: right-aligned to the keys."""
    return [key - query + i for query, key in zip(queries, keys, strict=True) for i in range(query)]


def attention_metadata(case: dict[str, Any], **changes: Any) -> torch.Tensor:
    """Metadata for a call."""
    q, picks = case["q"], case.get("cmp_sparse_indices")
    given = {name: case[name] for name in ATTENTION_METADATA if name in case}
    given |= {
        "num_heads_q": q.shape[-2],
        "num_heads_kv": 1,
        "head_dim": 512,
        "cmp_topk": 0 if picks is None else picks.shape[-1],
        "has_cmp_kv": "cmp_kv" in case,
    }
    if case.get("layout_q") == "BSND":
        given |= {"batch_size": q.shape[0], "max_seqlen_q": q.shape[1]}
    return ops().npu_sparse_attn_sharedkv_metadata(**{**given, **changes})


def attend(case: dict[str, Any], **changes: Any) -> torch.Tensor:
    """The output of a call; metadata is made for it unless it is given."""
    case = {**case, **changes}
    if "metadata" not in case:
        case["metadata"] = attention_metadata(case)
    return ops().npu_sparse_attn_sharedkv(case.pop("q"), **case)[0]


def indexer_case(
    queries: list[int], keys: list[int], *, ratio: int = 4, topk: int = 512, padding: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Arguments of a legal indexer call: TND queries, lengths without the leading 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(queries) + padding
    table, blocks = pages(generator, [key // ratio for key in keys], 16)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)

    def halves(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).half() / 64

    return {
        "query": codes(tokens, 64, 128),
        "key": codes(blocks, 16, 1, 128),
        "weights": normal(generator, tokens, 64, dtype=torch.float16),
        "query_dequant_scale": halves(tokens, 64),
        "key_dequant_scale": halves(blocks, 16, 1),
        "actual_seq_lengths_query": sums(queries)[1:],
        "actual_seq_lengths_key": int32(*keys),
        "block_table": table,
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": topk,
        "cmp_ratio": ratio,
    }


def indexer_metadata(case: dict[str, Any], **changes: Any) -> torch.Tensor:
    """Metadata for a call."""
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key", "layout_query", "layout_key", "sparse_count")
    given = {name: case[name] for name in (*names, "cmp_ratio", "sparse_mode") if name in case}
    return ops().npu_vllm_quant_lightning_indexer_metadata(64, 1, 128, 0, 0, **{**given, **changes})


def select(case: dict[str, Any], **changes: Any) -> torch.Tensor:
    """The indices [rows, sparse_count] of a call; metadata is made for it unless it is given."""
    case = {**case, **changes}
    if "metadata" not in case:
        case["metadata"] = indexer_metadata(case)
    return ops().npu_vllm_quant_lightning_indexer(**case)[0].flatten(0, -2)


def token_case(
    queries: list[int],
    keys: list[int],
    *,
    topk: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a legal call of the indexer over tokens: TND queries, lengths without the leading 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(queries) + padding
    table, blocks = pages(generator, keys, block_size)
    return {
        "query": normal(generator, tokens, 64, 128, dtype=dtype),
        "key": normal(generator, blocks, block_size, 1, 128, dtype=dtype),
        "weights": normal(generator, tokens, 64, dtype=dtype),
        "actual_seq_lengths_query": sums(queries)[1:],
        "actual_seq_lengths_key": int32(*keys),
        "block_table": table,
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": topk,
    }


def select_tokens(case: dict[str, Any], namespace: str = "_C_ascend", **changes: Any) -> torch.Tensor:
    """The indices [rows, sparse_count] of a call."""
    return ops(namespace).npu_lightning_indexer(**{**case, **changes})[0].flatten(0, -2)


def latent_case(
    queries: list[int],
    keys: list[int],
    *,
    heads: int = 2,
    topk: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a legal call of attention over latents: TND queries, every row with tokens in any order, then -1."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(queries) + padding
    table, blocks = pages(generator, keys, block_size)
    latents = normal(generator, blocks, block_size, 1, 512, dtype=dtype)
    picks = torch.full((tokens, 1, topk), -1, dtype=torch.int32)
    for row, position in enumerate(positions_of(queries, keys)):
        visible = max(position + 1, 0)
        count = int(torch.randint(1, topk + 1, (), generator=generator))
        chosen = torch.randperm(visible, generator=generator)[:count]
        picks[row, 0, : len(chosen)] = chosen.int()
    return {
        "query": normal(generator, tokens, heads, 512, dtype=dtype),
        "key": latents,
        "value": latents,
        "sparse_indices": picks,
        "scale_value": 192**-0.5,
        "block_table": table,
        "actual_seq_lengths_query": sums(queries)[1:],
        "actual_seq_lengths_kv": int32(*keys),
        "query_rope": normal(generator, tokens, heads, 64, dtype=dtype),
        "key_rope": normal(generator, blocks, block_size, 1, 64, dtype=dtype),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "attention_mode": 2,
    }


def attend_latents(case: dict[str, Any], namespace: str = "_C_ascend", **changes: Any) -> torch.Tensor:
    """The output of a call."""
    return ops(namespace).npu_sparse_flash_attention(**{**case, **changes})[0]


def compressor_case(
    ratio: int, lengths: list[int], starts: list[int], *, d: int = 128, padding: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Arguments of a legal compressor call in its one-state form; d is 512 at ratio 128."""
    generator = torch.Generator().manual_seed(seed)
    coff, d = (2, d) if ratio == 4 else (1, 512)
    tokens, hidden = sum(lengths) + padding, 1024
    block_size = 8 if ratio == 4 else 32
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    table, blocks = pages(generator, ends, block_size)
    rows = min(tokens, tokens // ratio + len(lengths))
    angles = torch.randn(rows, 32, generator=generator).repeat_interleave(2, dim=1)
    return {
        "x": normal(generator, tokens, hidden),
        "wkv": normal(generator, coff * d, hidden) / 32,
        "wgate": normal(generator, coff * d, hidden) / 32,
        "state_cache": torch.randn(blocks, block_size, 2 * coff * d, generator=generator),
        "ape": torch.randn(ratio, coff * d, generator=generator),
        "norm_weight": normal(generator, d),
        "rope_sin": angles.sin(),
        "rope_cos": angles.cos(),
        "state_block_table": table,
        "cu_seqlens": sums(lengths),
        "seqused": None,
        "start_pos": int32(*starts),
        "rope_head_dim": 64,
        "cmp_ratio": ratio,
        "coff": coff,
        "norm_eps": 1e-6,
        "rotary_mode": 2,
        "cache_mode": 1,
    }


def compress(case: dict[str, Any], **changes: Any) -> torch.Tensor:
    """The entries of a compressor call."""
    return ops().compressor(**{**case, **changes})


def halved(case: dict[str, Any]) -> dict[str, Any]:
    """The same call for the older form: two states, each with its block table; one and the same here."""
    dropped = ("state_cache", "state_block_table", "cache_mode")
    kv, score = (half.contiguous() for half in case["state_cache"].chunk(2, dim=-1))
    states = {"kv_state": kv, "score_state": score, "enable_grad": False}
    tables = dict.fromkeys(("kv_block_table", "score_block_table"), case["state_block_table"])
    return {name: value for name, value in case.items() if name not in dropped} | states | tables
