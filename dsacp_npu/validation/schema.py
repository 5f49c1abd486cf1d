"""The names of a dump: ours, and the spellings of them that engines use.

A spelling is accepted when it means the same thing, or what turns it into the same thing is written here. A name that
engines use for several things is in `REFUSED`, with what to write instead: what a tensor means is never guessed.
"""

from __future__ import annotations

from typing import NamedTuple

from dsacp_ref.config import AttentionConfig

__all__ = ["REFUSED", "SETTINGS", "TENSORS", "Setting", "Spelling", "Tensor", "canonical", "rope_settings"]


class Spelling(NamedTuple):
    """Another name of a tensor or setting.

    Fields:
        word: str, the name.
        engines: str, who writes it.
        rule: str, what turns it into ours, in words; empty where it is the same. `reading.CONVERTED` has a function
            for every one that is not.
    """

    word: str
    engines: str
    rule: str = ""


class Setting(NamedTuple):
    """A number or word that belongs to a whole dump."""

    name: str
    kind: type
    meaning: str
    spellings: tuple[Spelling, ...] = ()


class Tensor(NamedTuple):
    """An array of a dump.

    Fields:
        name: str, ours.
        scope: ``"step"``, the same on every rank, or ``"rank"``.
        kind: ``"int32"``, ``"float"`` or ``"int8"``.
        axes: words for its axes.
        meaning: str.
        spellings: tuple of Spelling.
        unit_axis: int or None; an axis of size 1 that engines put there and that is dropped.
    """

    name: str
    scope: str
    kind: str
    axes: tuple[str, ...]
    meaning: str
    spellings: tuple[Spelling, ...] = ()
    unit_axis: int | None = None


SETTINGS = (
    Setting("cp_size", int, "ranks that share the tokens", (Spelling("pcp_size", "vLLM"),)),
    Setting("cp_rank", int, "this file's rank; not in a file of all ranks"),
    Setting("split", str, "the rule, as `SPLITS` names it", (Spelling("prefill_cp_mode", "SGLang"),)),
    Setting(
        "num_input_tokens",
        int,
        "rows of the stream with its graph padding; left out without",
        (Spelling("num_tokens_padded", "vLLM"),),
    ),
    Setting("rows", str, "`full` where `output` has all tokens, `scattered` where it has the rank's own rows"),
    Setting("causal", bool, "false for a block-parallel draft; true if left out"),
    Setting("empty_extent", str, "extent of a row without queries: `zero` (if left out) or `prefix`"),
    Setting(
        "compress_ratio",
        int,
        "raw tokens an entry; 1 or 0 for window only",
        (Spelling("cmp_ratio", "CANN operators"), Spelling("compressor_ratio", "vllm-ascend")),
    ),
    Setting(
        "window_size",
        int,
        "keys visible, the query's own included",
        (
            Spelling("sliding_window", "config.json"),
            Spelling("ori_win_left", "CANN operators, vllm-ascend", "one more, for the query itself"),
        ),
    ),
    Setting("index_topk", int, "entries that the indexer chooses", (Spelling("sparse_count", "CANN operators"),)),
    Setting("block_size", int, "rows a block of raw keys", (Spelling("page_size", "SGLang"),)),
    Setting("cmp_block_size", int, "rows a block of entries"),
    Setting("softmax_scale", float, "of logits", (Spelling("sm_scale", "SGLang"),)),
    Setting("dtype", str, "of the computation, where floats were widened to be written"),
    Setting("rope_head_dim", int, "channels that turn", (Spelling("qk_rope_head_dim", "config.json"),)),
    Setting("rope_theta", float, "base of window-only layers"),
    Setting("compress_rope_theta", float, "base of layers with entries"),
    Setting("rope_factor", float, "YaRN of layers with entries; 1 is none"),
    Setting("rope_beta_fast", float, "YaRN"),
    Setting("rope_beta_slow", float, "YaRN"),
    Setting("rope_original_max_position", int, "YaRN"),
)

VA, XL, SG = "vllm-ascend", "xLLM", "SGLang"

TENSORS = (
    Tensor(
        "query_start_loc",
        "step",
        "int32",
        ("num_reqs + 1",),
        "offsets of each request's new tokens, global, first 0",
        (
            Spelling("q_cu_seq_lens", XL),
            Spelling("extend_seq_lens", SG, "lengths: summed up behind a leading 0"),
        ),
    ),
    Tensor(
        "seq_lens",
        "step",
        "int32",
        ("num_reqs",),
        "all keys of a request with this step's, global; 0 for a padded graph slot",
        (Spelling("kv_cu_seq_lens", XL, "offsets with their leading 0: differences"),),
    ),
    Tensor(
        "token_indices",
        "rank",
        "int32",
        ("local rows",),
        "flat token of each local row, -1 in pad rows",
        (Spelling("local_q_indices", SG),),
    ),
    Tensor(
        "cu_seqlens_q",
        "rank",
        "int32",
        ("rows + 1",),
        "local query offsets of the operator rows, first 0",
        (
            Spelling("local_query_start_loc", f"{VA}, {XL}"),
            Spelling(
                "actual_seq_lengths_query",
                f"CANN operators, {VA}",
                "offsets without the leading 0, which is put in front, unless there is one more of them than extents",
            ),
            Spelling(
                "actual_seq_q_prev_tensor",
                SG,
                "lengths of the first block of every request; with actual_seq_q_next_tensor, summed up in turn",
            ),
        ),
    ),
    Tensor(
        "seqused_kv",
        "rank",
        "int32",
        ("rows",),
        "right-aligned key extent of each operator row, raw tokens",
        (
            Spelling("local_seq_lens", f"{VA}, {XL}"),
            Spelling("actual_seq_lengths_key", f"CANN operators, {VA}"),
            Spelling("actual_seq_lengths_kv", f"CANN operators, {VA}"),
            Spelling("seqused_k", "FlashAttention"),
            Spelling(
                "kv_len_prev_tensor",
                SG,
                "extents of every request's first block; with kv_len_next_tensor, in turn. SGLang on an NPU adds "
                "extend_prefix_lens later: write them after that",
            ),
        ),
    ),
    Tensor(
        "request_indices",
        "rank",
        "int32",
        ("rows",),
        "the request of each operator row, -1 for a pad row",
        (Spelling("bs_idx", SG), Spelling("query_request_indices", SG)),
    ),
    Tensor(
        "positions",
        "rank",
        "int32",
        ("local rows",),
        "position of each local row in its request; pad rows hold anything",
        (Spelling("position_ids", "transformers"),),
    ),
    Tensor(
        "cos",
        "rank",
        "float",
        ("local rows", "pairs"),
        "cosines at the positions; pad rows hold anything. One column a pair, or two alike that lie side by side. What "
        "vllm-ascend calls `cos` is of all tokens: write it as `full_cos`",
        (Spelling("local_cos", f"{VA}, {XL}"),),
        1,
    ),
    Tensor(
        "sin", "rank", "float", ("local rows", "pairs"), "sines, as `cos`", (Spelling("local_sin", f"{VA}, {XL}"),), 1
    ),
    Tensor(
        "full_cos",
        "step",
        "float",
        ("num_tokens", "pairs"),
        "cosines by flat token, for the key side; rows beyond the last token hold anything",
        (),
        1,
    ),
    Tensor("full_sin", "step", "float", ("num_tokens", "pairs"), "sines, as `full_cos`", (), 1),
    Tensor(
        "swa_block_table",
        "step",
        "int32",
        ("num_reqs", "max_blocks"),
        "blocks of raw keys by request; read where used",
        (
            Spelling("block_table", f"{VA}, {XL}"),
            Spelling("block_tables", f"{VA}, {XL}"),
            Spelling("block_table_tensor", VA),
            Spelling("real_page_table", SG),
            Spelling("ori_block_table", "CANN operators"),
        ),
    ),
    Tensor(
        "cmp_block_table",
        "step",
        "int32",
        ("num_reqs", "max_cmp_blocks"),
        "blocks of entries by request; read where used",
    ),
    Tensor(
        "slot_mapping",
        "step",
        "int32",
        ("num_input_tokens",),
        "slot of each flat token's raw key, -1 in rows of no token; as pairs of block and place too",
        (
            Spelling("new_cache_slots", XL),
            Spelling("out_cache_loc", SG, "0 in rows beyond the last token is -1"),
        ),
    ),
    Tensor(
        "swa_block_table_rows",
        "rank",
        "int32",
        ("rows", "max_blocks"),
        "the table as the operator gets it: a row an operator row; read where used",
    ),
    Tensor("cmp_block_table_rows", "rank", "int32", ("rows", "max_cmp_blocks"), "likewise, of entries"),
    Tensor(
        "compress_cu_seqlens",
        "step",
        "int32",
        ("num_reqs + 1",),
        "offsets of the rows that the compressor gets, global",
    ),
    Tensor(
        "num_computed_tokens",
        "step",
        "int32",
        ("num_reqs",),
        "tokens of each request before this step: where the compressor starts; at most 0 in a padded graph slot",
        (Spelling("start_pos", VA), Spelling("extend_prefix_lens", SG)),
    ),
    Tensor("entry_start_loc", "step", "int32", ("num_reqs + 1",), "offsets of each request's completed entries"),
    Tensor("entry_requests", "step", "int32", ("capacity",), "request of each completed entry, -1 beyond the last"),
    Tensor("entry_indices", "step", "int32", ("capacity",), "its number in the request, -1 beyond the last"),
    Tensor("entry_slots", "step", "int32", ("capacity",), "its slot, -1 beyond the last"),
    Tensor("index_q", "rank", "float", ("local rows", "index_n_heads", "index_head_dim"), "index queries, rotated"),
    Tensor("index_weights", "rank", "float", ("local rows", "index_n_heads"), "signed weights of the index heads"),
    Tensor(
        "index_cache",
        "rank",
        "float",
        ("num_cmp_blocks", "cmp_block_size", "index_head_dim"),
        "index keys, rotated",
        (),
        2,
    ),
    Tensor(
        "index_cache.values",
        "rank",
        "int8",
        ("num_cmp_blocks", "cmp_block_size", "index_head_dim"),
        "instead, in int8",
        (),
        2,
    ),
    Tensor("index_cache.scales", "rank", "float", ("num_cmp_blocks", "cmp_block_size"), "their scales, float16", (), 2),
    Tensor(
        "topk_indices",
        "rank",
        "int32",
        ("local rows", "index_topk"),
        "entries that each query chose, within its request, -1 for none",
        (Spelling("cmp_sparse_indices", "CANN operators"), Spelling("sparse_indices", "CANN operators")),
        1,
    ),
    Tensor("topk_length", "rank", "int32", ("local rows",), "lanes of `topk_indices` that are read; all if left out"),
    Tensor(
        "q",
        "rank",
        "float",
        ("local rows", "num_heads", "head_dim"),
        "queries, turned",
        (Spelling("query", "CANN operators"),),
    ),
    Tensor(
        "swa_cache",
        "rank",
        "float",
        ("num_blocks", "block_size", "head_dim"),
        "raw keys after this step's were written",
        (Spelling("ori_kv", "CANN operators"),),
        2,
    ),
    Tensor(
        "cmp_cache",
        "rank",
        "float",
        ("num_cmp_blocks", "cmp_block_size", "head_dim"),
        "entries, likewise",
        (Spelling("cmp_kv", "CANN operators"),),
        2,
    ),
    Tensor(
        "attn_sink",
        "rank",
        "float",
        ("num_heads",),
        "logits of the sinks of the heads of `q`",
        (Spelling("sinks", "CANN operators, vLLM"),),
    ),
    Tensor(
        "out",
        "rank",
        "float",
        ("local rows", "num_heads", "head_dim"),
        "attention output, before it is turned back",
        (Spelling("attn_output", f"{VA}, {XL}"), Spelling("attention_out", "CANN operators")),
    ),
    Tensor(
        "lse",
        "rank",
        "float",
        ("local rows", "num_heads"),
        "natural log-sum-exp over keys, without the sink",
        (Spelling("softmax_lse", "CANN operators"),),
    ),
    Tensor(
        "local_output",
        "rank",
        "float",
        ("local rows", "hidden"),
        "finished rows of this rank before they are gathered",
    ),
    Tensor(
        "partial_output",
        "rank",
        "float",
        ("rows of all ranks", "hidden"),
        "this rank's summand of every rank's rows, the ranks' rows end to end",
    ),
    Tensor(
        "output",
        "rank",
        "float",
        ("num_input_tokens or local rows", "hidden"),
        "what the rank has after the ranks have exchanged: all tokens in order, or its own rows",
    ),
)

# Words that engines use, and why no check can take them as they are.
REFUSED = {
    "q_seq_lens": "xLLM: lengths on an NPU, offsets elsewhere; write query_start_loc or q_cu_seq_lens",
    "kv_seq_lens": "xLLM: lengths on an NPU, offsets elsewhere; write seq_lens or kv_cu_seq_lens",
    "cache_seqlens_int32": "SGLang: of requests, or of split rows; write seq_lens or seqused_kv",
    "nsa_cache_seqlens_int32": "SGLang: cut to index_topk; write seqused_kv before that",
    "nsa_seqlens_expanded": "SGLang: one a query; write seqused_kv, one an operator row (the same for round_robin)",
    "input_positions": "vllm-ascend: of all tokens; positions are this rank's",
    "page_table": "SGLang: of pages or of single tokens; write swa_block_table (real_page_table)",
    "page_table_1": "SGLang: slots by token; write swa_block_table, in blocks of block_size",
    "req_to_token": "SGLang: slots by token of all the pool's requests; write swa_block_table",
    "cu_seqlens_k": "offsets of packed keys, which a paged cache has not; write seqused_kv",
    "cu_seqlens_kv": "offsets of packed keys, which a paged cache has not; write seqused_kv",
}

# Where one thing is written as two tensors: the second, and the first that it belongs to.
SECOND = {"kv_len_next_tensor": "kv_len_prev_tensor", "actual_seq_q_next_tensor": "actual_seq_q_prev_tensor"}


def canonical() -> dict[str, str]:
    """Our name of every accepted word.

    Returns:
        dict, each of our names among the keys.
    """
    found = {}
    for entry in (*SETTINGS, *TENSORS):
        found[entry.name] = entry.name
        found |= {spelling.word: entry.name for spelling in entry.spellings}
    return found | {second: found[first] for second, first in SECOND.items()}


def rope_settings(config: AttentionConfig) -> dict[str, int | float]:
    """The settings that a model's RoPE tables follow from.

    Args:
        config: AttentionConfig.

    Returns:
        dict by our names.
    """
    return {
        "rope_head_dim": config.rope_head_dim,
        "rope_theta": float(config.rope_theta),
        "compress_rope_theta": float(config.compress_rope_theta),
        "rope_factor": float(config.rope_factor),
        "rope_beta_fast": float(config.rope_beta_fast),
        "rope_beta_slow": float(config.rope_beta_slow),
        "rope_original_max_position": config.rope_original_max_position,
    }
