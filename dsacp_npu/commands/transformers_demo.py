"""`python -m dsacp_npu.integrations.transformers`: a small model reads a text over processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu._tensors import torch
from dsacp_npu.commands import outside
from dsacp_npu.commands.counted import counted_transport
from dsacp_npu.commands.on_ranks import on_ranks
from dsacp_npu.commands.progress import waiting
from dsacp_npu.distributed import Ranks
from dsacp_npu.integrations.transformers import enable
from dsacp_npu.parallel import parallel_of
from dsacp_ref._arguments import Parser, told
from dsacp_ref.config import SPLITS, AttentionConfig, ParallelConfig, v4_flash
from dsacp_ref.mla_config import MLAConfig, v32
from dsacp_ref.spec import ContractError, UnsupportedError, check_int, contract_error

# The first layers of V4-Flash, small; eight output groups, as many as the real ones, for up to eight ranks.
LAYERS = 7
CONFIG = replace(
    outside.SIZES["tiny"],
    num_hidden_layers=LAYERS,
    compress_ratios=v4_flash().compress_ratios[:LAYERS],
    num_heads=8,
    o_groups=8,
    # With few heads, ReLU makes many index scores exactly 0, and libraries choose differently among equal ones.
    index_n_heads=v4_flash().index_n_heads,
)
# V3.2, as small; every layer is alike. Released rotary constants, except that YaRN begins early.
MLA_LAYERS = 3
MLA_CONFIG = replace(
    v32(),
    hidden_size=96,
    num_hidden_layers=MLA_LAYERS,
    num_heads=8,
    q_lora_rank=40,
    kv_lora_rank=32,
    nope_head_dim=32,
    rope_head_dim=16,
    v_head_dim=24,
    index_head_dim=32,
    index_topk=24,
    rope_original_max_position=64,
    max_position_embeddings=64 * int(v32().rope_factor),
)
MLA_SURROUNDINGS = {"intermediate_size": 48, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
MLA_SURROUNDINGS |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
BYTES = 256  # the vocabulary
CHUNK = 256  # tokens that the untouched model reads at once

EXAMPLES = """\
examples:
  %(prog)s --prompt-file Makefile
  %(prog)s --prompt-file Makefile --processes 4 --split zigzag
  %(prog)s --prompt-file Makefile --model v32 --split round_robin
"""


class Report(NamedTuple):
    """What one rank says.

    Fields:
        num_tokens: int, its own tokens of the text.
        cache_bytes: int, all layers' caches.
        received_bytes: int, what its attention received from the other ranks.
        typical, difference, largest: floats, largest difference of the logits from the untouched model's at the median
            token and at the farthest one, and the largest logit.
        same_choices: int, tokens after which both models say the same byte.
    """

    num_tokens: int
    cache_bytes: int
    received_bytes: int
    typical: float
    difference: float
    largest: float
    same_choices: int


def build_causal_model(config: AttentionConfig, *, vocab_size: int, seed: int = 0) -> Any:
    """`outside.build_model` with token ids before it, all experts for each, and logits behind it."""
    inner = outside.build_model(config, seed=seed)  # refuses what transformers cannot take
    import transformers

    options: dict[str, Any] = config.to_json() | outside.SURROUNDINGS | {"vocab_size": vocab_size}
    options |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    options |= {"bos_token_id": None, "eos_token_id": None}  # generate() goes on to the length it is asked for
    # A near tie among experts would be another model, and no matter of attention: every token goes to all of them.
    options["num_experts_per_tok"] = options["n_routed_experts"]
    with torch.random.fork_rng(devices=[]):
        model: Any = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**options))
    rng = np.random.default_rng([seed, vocab_size])
    for ends in (model.model.embed_tokens, model.lm_head):
        drawn = rng.standard_normal(tuple(ends.weight.shape), dtype=np.float32)
        ends.weight.data.copy_(torch.from_numpy(drawn * np.float32(1.5 / config.hidden_size**0.5)))
    weights = {name: weight for name, weight in inner.state_dict().items() if not name.startswith("embed_tokens.")}
    model.model.load_state_dict(weights, strict=False)
    return model.eval().requires_grad_(False)


def build_mla_causal_model(config: MLAConfig, *, vocab_size: int, seed: int = 0) -> Any:
    """A `DeepseekV32ForCausalLM` with random float32 weights, drawn as `outside.build_model` draws them."""
    import transformers

    options: dict[str, Any] = config.to_json() | MLA_SURROUNDINGS | {"vocab_size": vocab_size}
    options |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    options |= {"bos_token_id": None, "eos_token_id": None, "num_key_value_heads": config.num_heads}
    options["num_experts_per_tok"] = options["n_routed_experts"]  # as above
    with torch.random.fork_rng(devices=[]):
        model: Any = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**options))
    model = model.to(torch.float32)
    rng = np.random.default_rng([seed, vocab_size])
    for weight in model.parameters():
        drawn = rng.standard_normal(tuple(weight.shape), dtype=np.float32)
        scaled = 1 + 0.3 * drawn if weight.ndim == 1 else drawn * 1.5 / weight.shape[-1] ** 0.5
        weight.data.copy_(torch.from_numpy(scaled))
    return model.eval().requires_grad_(False)


class Demo(NamedTuple):
    """What differs between the two models.

    Fields:
        config: of the attention.
        build: what makes the model of it.
        num_layers: int.
        modes: options besides the switch and the split.
        most_ranks, why: int, and what bounds it.
    """

    config: Any
    build: Callable[..., Any]
    num_layers: int
    modes: dict[str, Any]
    most_ranks: int
    why: str


DEMOS = {
    "v4": Demo(CONFIG, build_causal_model, LAYERS, {}, CONFIG.o_groups, "ranks share the output groups"),
    "v32": Demo(
        MLA_CONFIG,
        build_mla_causal_model,
        MLA_LAYERS,
        {"dsa_cp_key_mode": "gather_kv", "dsa_cp_output_mode": "replicated_weight"},
        CONFIG.o_groups,
        "the small model needs no more",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and say whether it worked: 2 for a call that cannot work."""
    try:
        args = parser().parse_args(argv)
        text = Path(args.prompt_file).read_bytes()
        if not text:
            raise contract_error("--prompt-file", "hold at least one byte", "an empty file")
        demo = DEMOS[args.model]
        size = check_int("--processes", args.processes, 1, demo.most_ranks, demo.why)
        options = ParallelConfig(enable_dsa_cp=True, prefill_cp_mode=args.split, **demo.modes)
        with waiting(f"{size} processes read {len(text)} tokens"):
            found = on_ranks(size, rank_report, args.model, text, options)
        show(found, f"{len(text)} tokens, {demo.num_layers} layers")
    except (ContractError, UnsupportedError, ImportError, OSError) as error:
        print(f"dsacp_npu.integrations.transformers: error: {told(error)}", file=sys.stderr)
        return 2
    return 0


def parser() -> Parser:
    """The flags."""
    made = Parser(
        prog="python -m dsacp_npu.integrations.transformers",
        description="A small random DeepSeek-V4 or V3.2 of transformers reads the bytes of a file, its attention "
        "split\nover processes, and its logits are compared with those of the untouched model.",
        epilog=EXAMPLES,
    )
    made.add_argument("--prompt-file", required=True, metavar="FILE", help="any file; its bytes are the tokens")
    made.add_argument("--model", choices=DEMOS, default="v4", help="which of them (default: v4)")
    words = "ranks, one process each, 1 to 8 (default: 2)"
    made.add_argument("--processes", type=int, metavar="N", default=2, help=words)
    words = f"the rule that hands tokens to ranks: {', '.join(SPLITS)} (default: contiguous)"
    made.add_argument("--split", metavar="RULE", default="contiguous", help=words)
    return made


def rank_report(ranks: Ranks, name: str, text: bytes, options: ParallelConfig) -> Report:
    """One rank: the model untouched, then with its attention split."""
    model = DEMOS[name].build(DEMOS[name].config, vocab_size=BYTES)
    ids = torch.tensor([list(text)])
    plain = untouched_logits(model, ids)
    session = enable(model, num_tokens=len(text), max_requests=1, parallel=parallel_of(options, tp=ranks))
    with counted_transport(torch.distributed) as received, session.step({"text": len(text)}) as step:
        logits = model(ids, position_ids=step.position_ids).logits
    partition = step.metadata.partition  # None in a step that every rank runs whole
    apart = (logits - plain).abs().amax(dim=-1)
    return Report(
        len(text) if partition is None else int((partition.token_indices[ranks.cp_rank] >= 0).sum()),
        sum(cache.num_bytes for cache in session.caches),
        sum(call.num_bytes for call in received),
        float(apart.median()),
        float(apart.max()),
        float(plain.abs().max()),
        int((logits.argmax(dim=-1) == plain.argmax(dim=-1)).sum()),
    )


def untouched_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the model says before it is enabled; in one go it would hold a number for every head and two tokens."""
    import transformers

    past = transformers.DynamicCache(config=model.config)
    return torch.cat([model(part, cache=past, use_cache=True).logits for part in torch.split(ids, CHUNK, dim=1)], dim=1)


def show(rows: Sequence[Report], title: str) -> None:
    """The table."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError("the table is printed with rich; pip install rich") from error
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    columns = ("rank", "tokens", "caches, MB", "received, MB", "apart: median", "most", "of", "same choice")
    for column in columns:
        table.add_column(column, justify="right")
    for rank, row in enumerate(rows):
        table.add_row(
            str(rank),
            str(row.num_tokens),
            f"{row.cache_bytes / 1e6:.3f}",
            f"{row.received_bytes / 1e6:.3f}",
            f"{row.typical:.1e}",
            f"{row.difference:.1e}",
            f"{row.largest:.1f}",
            str(row.same_choices),
        )
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print("apart: logits from the untouched model's; of two keys that score alike, either may be chosen")
