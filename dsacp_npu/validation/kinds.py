"""Every kind of fault that `validate` can name: what it is, what helps, and where it was reported."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "Kind"]


class Kind(NamedTuple):
    """A kind of fault.

    Fields:
        sentence: str, what is the matter.
        fix: str, what to do.
        source: str, a public report; may be empty.
    """

    sentence: str
    fix: str
    source: str = ""


KINDS = {
    # --- lengths and offsets ---
    "leading_zero_missing": Kind(
        "leading zero missing", "put 0 in front: offsets have one entry more than rows", "ROCm/ATOM#1595"
    ),
    "lengths_not_cumulative": Kind(
        "lengths of rows where offsets are due", "sum them up behind a leading 0", "xLLM-AI/xllm#2097"
    ),
    "offsets_of_keys": Kind(
        "offsets of keys where those of queries are due", "sum up query lengths, not extents", "xLLM-AI/xllm#2097"
    ),
    "offsets_for_lengths": Kind(
        "offsets where lengths are due", "hand over one length a row: the differences", "xLLM-AI/xllm#2097"
    ),
    "global_query_offsets": Kind(
        "query offsets are global, rows are local",
        "count the rank's own queries: the last offset is its number of rows",
        "sgl-project/sglang#38603",
    ),
    "local_query_offsets": Kind(
        "query offsets are local, rows are global",
        "the write side (compressor, slots) stays global: hand it query_start_loc",
        "xLLM-AI/xllm#2097",
    ),
    "local_key_lengths": Kind(
        "lengths of keys are one rank's extents, where those of requests are due",
        "seq_lens is the same on every rank",
        "vllm-project/vllm#46076",
    ),
    "rows_compacted": Kind(
        "rows without queries were left out, so that later rows stand at another request's place",
        "keep a row of length 0, or compact tables and lengths alike",
        "vllm-project/vllm-ascend#11807",
    ),
    "row_a_request": Kind(
        "one row a request, where the split gives several pieces",
        "zigzag has two operator rows a request, round robin one a token",
    ),
    "pads_counted_as_queries": Kind(
        "pad rows counted as queries of the last request", "pads belong to no request", "ROCm/ATOM#1595"
    ),
    # --- key extents ---
    "global_key_length": Kind(
        "key length is global, queries are local",
        "a row's extent is num_computed_tokens plus the end of its piece: operators align queries to its end",
        "xLLM-AI/xllm#2097",
    ),
    "extent_not_reduced": Kind(
        "extent not reduced for rows on later ranks",
        "subtract the queries behind the piece: seq_len - (query_len - end). (It is right for a block-parallel draft, "
        "which says causal false.)",
        "xLLM-AI/xllm#2097",
    ),
    "one_extent_a_request": Kind(
        "all pieces of a request have the extent of the last one",
        "each piece ends at its own last query",
        "mindspore-ai/hyper-parallel#55",
    ),
    "prefix_lost": Kind(
        "the prefix (tokens before this step) is not counted",
        "add num_computed_tokens = seq_len - query_len",
        "sgl-project/sglang#23415",
    ),
    "padding_in_prefix": Kind(
        "prefix computed with padded query lengths", "subtract the real query length", "sgl-project/sglang#23415"
    ),
    "aligned_left": Kind(
        "extent is the row's own number of queries: aligned left",
        "operators align right: num_computed_tokens plus the end of the piece",
        "mindspore-ai/hyper-parallel#55",
    ),
    "negative_extent": Kind(
        "extent of a padded slot across a rank's border is not floored at 0",
        "a slot with seq_len 0 has extent 0",
        "vllm-project/vllm-ascend#12840",
    ),
    "padded_slot_extent": Kind(
        "a padded slot has keys", "a slot with seq_len 0 has extent 0", "vllm-project/vllm-ascend#12840"
    ),
    "extent_in_entries": Kind(
        "extent counted in entries", "operators take raw tokens and divide themselves", "xLLM-AI/xllm#1997"
    ),
    "empty_rows_prefix": Kind(
        "rows without queries have the prefix as their extent, the other convention",
        "if it is yours, say empty_extent prefix; else give such rows 0",
        "xLLM-AI/xllm#2097",
    ),
    "empty_rows_zero": Kind(
        "rows without queries have extent 0, the other convention",
        "if it is yours, say empty_extent zero; else give such rows the prefix up to their piece",
        "vllm-project/vllm-ascend#9531",
    ),
    # --- layout ---
    "other_split": Kind(
        "cut by another split rule", "name the rule that was used, the same for all tensors", "verl-project/verl#7297"
    ),
    "wrong_rank": Kind(
        "that of another rank", "take cp_rank from the group that splits tokens", "sgl-project/sglang#24560"
    ),
    "wrong_cp_size": Kind(
        "cut for another number of ranks", "take cp_size from the group that splits", "sgl-project/sglang#24560"
    ),
    "not_split": Kind("not split at all", "take this rank's rows of it", "sgl-project/sglang#19367"),
    "graph_padding_ignored": Kind(
        "cut without the graph padding of the stream",
        "the flat rules cut num_input_tokens rows",
        "sgl-project/sglang#19820",
    ),
    # --- positions and tables ---
    "consecutive_positions": Kind(
        "positions consecutive although the split is strided",
        "take positions by token, as rows are taken",
        "sgl-project/sglang#28463",
    ),
    "flat_tokens_as_positions": Kind(
        "flat token indices where positions are due", "a position counts within its request"
    ),
    "rows_as_positions": Kind("local row numbers where positions are due", "a position counts within its request"),
    "positions_of_global_extents": Kind(
        "positions aligned to the end of the whole request",
        "local queries end at their own extent, not at seq_len",
        "xLLM-AI/xllm#2097",
    ),
    "positions_in_16_bit": Kind(
        "positions went through a 16-bit float", "keep positions in int32", "vllm-project/vllm-ascend#9739"
    ),
    "table_in_16_bit": Kind(
        "RoPE table in a 16-bit float", "keep cos and sin in float32", "vllm-project/vllm-ascend#9739"
    ),
    "plain_frequencies": Kind(
        "frequencies without YaRN in a layer with entries",
        "layers with entries take compress_rope_theta and YaRN",
    ),
    "yarn_frequencies": Kind(
        "frequencies of layers with entries in a window-only layer", "window-only layers take rope_theta without YaRN"
    ),
    "other_theta": Kind("frequencies of the other base", "window-only layers: rope_theta; others: compress_rope_theta"),
    "half_split_table": Kind(
        "table laid out for half-split channels", "V4 turns adjacent pairs: columns 2i and 2i+1 are alike"
    ),
    "sine_negated": Kind("sines of the inverse table", "queries and keys turn forward; outputs turn back"),
    "cos_and_sin_swapped": Kind("cosines and sines are swapped", "hand them over in the other order"),
    # --- slots and tables ---
    "rows_of_batch": Kind(
        "the batch's own table where one row an operator row is due",
        "repeat a request's row for each of its operator rows",
    ),
    "table_of_another_request": Kind(
        "block table of another request", "rows of table and lengths must be in one order"
    ),
    "other_block_size": Kind("slots computed with another block size", "use the block size of the cache"),
    "slots_mapped_twice": Kind(
        "slots were mapped through the block table again", "map positions once, at one place", "xLLM-AI/xllm#1623"
    ),
    "slots_of_sharded_cache": Kind(
        "slots of a cache that is spread over the ranks, where every rank keeps all keys",
        "use the global slots: each rank writes every key",
        "xLLM-AI/xllm#1623",
    ),
    "own_slots_only": Kind(
        "only this rank's tokens have slots",
        "the write side is global: every rank writes the keys of all tokens",
        "xLLM-AI/xllm#2097",
    ),
    "stale_slots": Kind(
        "slots of rows that belong to no token are not -1",
        "fill the rest of the buffer with -1 in every step",
        "vllm-project/vllm-ascend#9818",
    ),
    "slots_of_flat_tokens": Kind("slots by flat token", "map positions within the request, through its row"),
    # --- compressor ---
    "starts_at_zero": Kind(
        "every request starts at 0", "hand over num_computed_tokens", "GDzhu01/vllm-ascend-deepseekv4#76"
    ),
    "start_is_local": Kind(
        "start is that of the rank's piece", "the compressor sees all tokens: its start is global", "xLLM-AI/xllm#2097"
    ),
    "start_is_end": Kind("start is the length with this step's tokens", "subtract the query length"),
    "entries_of_own_rows": Kind(
        "entries counted from the rank's own rows", "count from query_start_loc: entries are global"
    ),
    "entries_of_new_tokens": Kind(
        "entries counted from new tokens alone",
        "(start + length) // ratio - start // ratio: the open window goes on",
        "sgl-project/sglang#35848",
    ),
    "entries_one_late": Kind(
        "an entry is counted one token late",
        "entry i is complete with token (i + 1) * ratio - 1",
        "GDzhu01/vllm-ascend-deepseekv4#76",
    ),
    "entries_rounded_up": Kind("the unfinished entry is counted", "round down: only complete entries exist"),
    "entry_off_by_one": Kind("slots of the entry before or behind", "entry i lies at logical row i of its table"),
    "entries_at_token_rows": Kind("entries lie at rows of tokens", "the table of entries counts entries, not tokens"),
    # --- selections ---
    "own_unfinished_entry": Kind(
        "a query sees its own unfinished entry",
        "(position + 1) // ratio entries are visible, not position // ratio + 1",
        "vllm-project/tpu-inference#3536",
    ),
    "future_entries": Kind(
        "entries of the future are visible",
        "bound the choice by (position + 1) // ratio",
        "huggingface/transformers#45820",
    ),
    "collapsed": Kind(
        "every choice is one repeated entry",
        "build the indexer's metadata with the lengths of the rows that it serves",
        "xLLM-AI/xllm#1997",
    ),
    "packed_entries": Kind(
        "entries are counted through all requests", "entries count within their request", "vllm-project/vllm#54541"
    ),
    "physical_slots": Kind("slots of the cache where entries are due", "the operator looks slots up itself"),
    "entries_as_tokens": Kind("raw positions where entries are due", "divide by the compress ratio"),
    "lanes_not_cleared": Kind(
        "lanes behind the last entry are not -1",
        "fill them with -1, or say topk_length",
        "flashinfer-ai/flashinfer#5095",
    ),
    "entry_twice": Kind("an entry twice in a row", "choose distinct entries", "vllm-project/vllm#49896"),
    "garbage_entries": Kind(
        "entries that do not exist", "NaN scores count as -inf; each index is -1 or visible", "vllm-project/vllm#49896"
    ),
    "too_few_entries": Kind(
        "fewer entries than there is room for",
        "exactly min(index_topk, visible) are chosen, whatever their scores",
        "vllm-project/vllm#49896",
    ),
    "choices_of_one_query": Kind(
        "all queries of a request have the choice of its last one",
        "each query chooses for itself",
        "huggingface/transformers#45758",
    ),
    "relu_missing": Kind("scores without relu", "sum over heads of weight * relu(q . k)"),
    "query_not_rotated": Kind("one of the two sides is not rotated", "rotate index queries and index keys alike"),
    "weights_unsigned": Kind("head weights without their sign", "weights are signed"),
    "worst_chosen": Kind("the lowest scores were chosen", "choose by score descending"),
    # --- attention ---
    "sink_missing": Kind("the sink is missing", "add exp(sink) to the denominator", "vllm-project/vllm#43809"),
    "sink_once_a_rank": Kind(
        "the sink is counted once per rank",
        "merge partials without sink, then apply it once",
        "vllm-project/vllm#43809",
    ),
    "sink_scaled": Kind("the sink is scaled like a logit", "compare the sink with logits after scaling"),
    "window_one_short": Kind("the window is one key short", "window_size counts the query's own key"),
    "window_one_long": Kind(
        "the window is one key long", "window_size counts the query's own key: ori_win_left is one less"
    ),
    "scale_missing": Kind("logits are not scaled", "hand softmax_scale over: an operator's default is not it"),
    "global_mask": Kind(
        "masked by the whole request's length",
        "align local queries to their own extent",
        "xLLM-AI/xllm#2097",
    ),
    "entries_missing": Kind("entries are not attended to", "attend to window and entries in one softmax"),
    "window_missing": Kind("the window is not attended to", "attend to window and entries in one softmax"),
    "selection_ignored": Kind("all visible entries, not the chosen ones", "hand the selection over"),
    "no_entry_lanes_used": Kind(
        "lanes of -1 read an entry", "-1 is no entry, wherever it stands", "flashinfer-ai/flashinfer#5095"
    ),
    "lanes_past_length_used": Kind(
        "lanes past topk_length are used", "stop at topk_length", "flashinfer-ai/flashinfer#5095"
    ),
    "turned_back_already": Kind("the output is turned back already", "`out` is that before the inverse RoPE"),
    "nan_rows": Kind(
        "NaN where the right output is finite",
        "a part without keys has weight 0 and must not be multiplied: 0 * NaN is NaN",
        "ROCm/ATOM#1832",
    ),
    "rows_without_keys": Kind(
        "rows without keys are not zero",
        "a query that sees nothing has output 0 and lse -inf",
        "vllm-project/vllm#46076",
    ),
    "rows_of_neighbours": Kind("rows are shifted against their queries", "rows of q and out are in one order"),
    "lse_base_two": Kind("lse to base 2", "multiply by ln 2: lse is natural"),
    "lse_with_sink": Kind("lse with the sink", "lse is of the keys alone", "vllm-project/vllm#43809"),
    # --- collected output ---
    "order_not_restored": Kind(
        "rows lie rank after rank", "put them in token order with the restore permutation", "xLLM-AI/xllm#1997"
    ),
    "pad_rows_kept": Kind("pad rows were left in", "drop each rank's pad rows", "sgl-project/sglang#19820"),
    "rank_missing": Kind(
        "a rank's share is missing", "every rank takes part, rows or none", "vllm-project/vllm-ascend#17097"
    ),
    "other_tokens_summed": Kind(
        "summands of different tokens were added",
        "gather tokens, run, reduce, then take own rows",
        "xLLM-AI/xllm#2097",
    ),
    "ranks_in_other_order": Kind(
        "ranks were gathered in another order",
        "split and gather over one group in one order",
        "sgl-project/sglang#24560",
    ),
}
