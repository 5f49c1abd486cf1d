"""What a layer of each kind of a model does and keeps, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsacp_ref.config import AttentionConfig, _json_in, v4_flash, v4_pro
from dsacp_ref.mla_config import MLAConfig, v32
from dsacp_ref.spec import check_int, contract_error

__all__ = ["PRESETS", "Experts", "LayerKind", "Model", "model_of", "model_of_json"]

BF16, FLOAT32 = 2, 4  # bytes of a number


class Experts(NamedTuple):
    """What stands beside attention in a layer.

    Fields:
        routed, active, shared: ints, experts of a layer, those that a token goes to, and those that all go to.
        width: int, channels between an expert's matrices.
        dense_layers, dense_width: ints, first layers that have one wide network instead, and its channels.
    """

    routed: int
    active: int
    shared: int
    width: int
    dense_layers: int = 0
    dense_width: int = 0


class LayerKind(NamedTuple):
    """One kind of attention layer.

    Fields:
        name: str.
        num_layers: int, layers of the kind.
        compress_ratio: int, raw tokens an entry; 1 has no entries.
        indexed: bool, whether an indexer chooses.
        heads, groups: ints, of queries, and of the output projection; a share of ranks must divide both.
        window: int, raw keys that a query sees; 0 where the indexer chooses among them (V3.2).
        top_k: int, keys or entries that are chosen; 0 for all.
        query_whole, query_heads, key_side, output: ints, multiply-adds a row (and weights) of the projections: of the
            query side, in common and by head; of keys and compressors; and of the output.
        group_parts: (int, int), output weights of a group that a gather of weights brings in two calls.
        key_flop, score_flop: ints, operations a head and key of attention, and a score of the indexer.
        head_out: int, channels of a head's output.
        key_bytes: int, of a raw key (or latent) in bfloat16; what attention reads of any key.
        entry_bytes, index_bytes: ints, of an entry and an index key as they travel, 0 without.
        projected_bytes: int, of a row's projections for pooling, in float32.
        pool_rows: int, rows that the pooling of an entry reaches over, and that the next step goes on from.
    """

    name: str
    num_layers: int
    compress_ratio: int
    indexed: bool
    heads: int
    groups: int
    window: int
    top_k: int
    query_whole: int
    query_heads: int
    key_side: int
    output: int
    group_parts: tuple[int, int]
    key_flop: int
    score_flop: int
    head_out: int
    key_bytes: int
    entry_bytes: int
    index_bytes: int
    projected_bytes: int
    pool_rows: int

    @property
    def is_latent(self) -> bool:
        """Whether this is a V3.2 layer: keys are latents of tokens, and there are neither windows nor entries."""
        return self.window == 0


class Model(NamedTuple):
    """A model as planning sees it.

    Fields:
        name: str.
        hidden: int, channels of a row between layers.
        streams: int, residual streams of a row (V4's hyper-connections have 4).
        vocab: int, rows of the embedding, and of the head.
        kinds: LayerKind, one an attention layer's kind.
        experts: Experts.
    """

    name: str
    hidden: int
    streams: int
    vocab: int
    kinds: tuple[LayerKind, ...]
    experts: Experts

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(kind.num_layers for kind in self.kinds)

    @property
    def released_precision(self) -> str:
        """How its numbers are held as released: V4 has routed experts in 4 bits, V3.2 in 8."""
        return "w8a8" if any(kind.is_latent for kind in self.kinds) else "w4a8"


def v4_kind(config: AttentionConfig, compress_ratio: int, num_layers: int) -> LayerKind:
    """A V4 layer of some ratio."""
    hidden, heads, width, lora = config.hidden_size, config.num_heads, config.head_dim, config.q_lora_rank
    indexed, pools = compress_ratio == 4, compress_ratio > 1
    twice = 2 if indexed else 1  # windows of ratio 4 overlap: each row is projected for two entries
    index_width = config.index_head_dim * indexed
    pooled = 2 * twice * (width + index_width) * pools  # values and gates
    groups, group_out = config.o_groups, config.o_lora_rank
    query_whole = hidden * lora
    if indexed:
        query_whole += config.index_n_heads * (lora * config.index_head_dim + hidden)
    return LayerKind(
        name=f"ratio {compress_ratio}",
        num_layers=num_layers,
        compress_ratio=compress_ratio,
        indexed=indexed,
        heads=heads,
        groups=groups,
        window=config.window_size,
        top_k=config.index_topk * indexed,
        query_whole=query_whole,
        query_heads=lora * heads * width,
        key_side=hidden * (width + pooled),
        output=heads * width * group_out + groups * group_out * hidden,
        group_parts=(heads // groups * width * group_out, group_out * hidden),
        key_flop=4 * width,
        score_flop=config.index_n_heads * (2 * config.index_head_dim + 2) * indexed,
        head_out=width,
        key_bytes=width * BF16,
        entry_bytes=width * BF16 * pools,
        index_bytes=index_width * BF16,
        projected_bytes=pooled * FLOAT32,
        pool_rows=twice * compress_ratio * pools,
    )


def v32_kind(config: MLAConfig) -> LayerKind:
    """A V3.2 layer: queries are taken to the latents' space, and outputs out of it."""
    hidden, heads, lora, latent = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    key_width = latent + config.rope_head_dim
    by_head = lora * (config.nope_head_dim + config.rope_head_dim) + latent * (config.nope_head_dim + config.v_head_dim)
    return LayerKind(
        name="V3.2",
        num_layers=config.num_hidden_layers,
        compress_ratio=1,
        indexed=True,
        heads=heads,
        groups=heads,
        window=0,
        top_k=config.index_topk,
        query_whole=hidden * lora + config.index_n_heads * (lora * config.index_head_dim + hidden),
        query_heads=heads * by_head,
        key_side=hidden * (key_width + config.index_head_dim),
        output=heads * config.v_head_dim * hidden,
        group_parts=(config.v_head_dim * hidden, 0),
        key_flop=2 * (key_width + latent),
        score_flop=config.index_n_heads * (2 * config.index_head_dim + 2),
        head_out=config.v_head_dim,
        key_bytes=key_width * BF16,
        entry_bytes=0,
        index_bytes=config.index_head_dim * BF16,
        projected_bytes=0,
        pool_rows=0,
    )


def v4_model(name: str, config: AttentionConfig, experts: Experts, streams: int, vocab: int) -> Model:
    """A V4 model; draft layers are no part of a prefill's cost."""
    ratios = config.compress_ratios[: config.num_hidden_layers]
    kinds = tuple(v4_kind(config, ratio, ratios.count(ratio)) for ratio in sorted(set(ratios)))
    return Model(name, config.hidden_size, streams, vocab, kinds, experts)


PRESETS = ("v4-flash", "v4-pro", "v3.2")
VOCAB = 129280


def model_of(name: str) -> Model:
    """The model of a preset's name, or of a checkpoint's ``config.json``.

    Args:
        name: one of `PRESETS`, or the path of a file.

    Returns:
        Model.

    Raises:
        ContractError: neither, or a file that lacks what planning needs, by its key.
        UnsupportedError: a model of another design.

    >>> [(kind.name, kind.num_layers) for kind in model_of("v4-flash").kinds]
    [('ratio 1', 2), ('ratio 4', 21), ('ratio 128', 20)]
    """
    if name == "v4-flash":
        return v4_model(name, v4_flash(), Experts(256, 6, 1, 2048), 4, VOCAB)
    if name == "v4-pro":
        return v4_model(name, v4_pro(), Experts(384, 6, 1, 3072), 4, VOCAB)
    if name == "v3.2":
        experts = Experts(256, 8, 1, 2048, dense_layers=3, dense_width=18432)
        return Model(name, v32().hidden_size, 1, VOCAB, (v32_kind(v32()),), experts)
    if not Path(name).is_file():
        raise contract_error("--model", f"be {', '.join(PRESETS)}, or a config.json", repr(name), "no such file")
    return model_of_json(_json_in(name), name)


def model_of_json(mapping: Mapping[str, Any], name: str = "config.json") -> Model:
    """The model that the keys of a ``config.json`` describe.

    Args:
        mapping: the parsed JSON object: the keys that `AttentionConfig.from_json` or `MLAConfig.from_json` takes, and
            the experts' ``n_routed_experts``, ``num_experts_per_tok``, ``n_shared_experts``, ``moe_intermediate_size``
            and ``vocab_size``; V4's ``hc_mult``, V3.2's ``first_k_dense_replace`` and ``intermediate_size``.
        name: str, of the model in tables.

    Returns:
        Model.

    Raises:
        ContractError: a missing key or a bad value, by name.
        UnsupportedError: a model of another design.
    """
    is_latent = isinstance(mapping, Mapping) and "kv_lora_rank" in mapping
    config = MLAConfig.from_json(mapping) if is_latent else AttentionConfig.from_json(mapping)

    def count(key: str, least: int = 1) -> int:
        if key not in mapping:
            raise contract_error(key, f"be in {name}", "no such key", "planning counts the experts' work and bytes")
        return check_int(key, mapping[key], least)

    experts = Experts(
        count("n_routed_experts"),
        count("num_experts_per_tok"),
        count("n_shared_experts", 0),
        count("moe_intermediate_size"),
    )
    vocab = count("vocab_size")
    if isinstance(config, MLAConfig):
        dense = count("first_k_dense_replace", 0)
        if dense > config.num_hidden_layers:
            raise contract_error("first_k_dense_replace", f"be at most {config.num_hidden_layers} layers", dense)
        experts = experts._replace(dense_layers=dense, dense_width=count("intermediate_size"))
        return Model(name, config.hidden_size, 1, vocab, (v32_kind(config),), experts)
    return v4_model(name, config, experts, count("hc_mult"), vocab)
