"""``python -m dsacp_npu plan``: what one prefill costs under every way to share it among ranks, and the best of them.

Work, bytes and memory are counted from lengths, exactly; seconds are those of a model, counts over a chip's rates
(`docs/planning.md` says what it assumes, and how it compares with published times). With ``--trace`` the prompts of a
service are cut into steps, and each step is planned.

``--json`` writes one object. Bytes, operations, tokens and seconds are plain numbers::

    schema        1; it counts up when a key goes or changes its meaning
    call          model, chip, ranks, precision; query_lens and computed, or trace, step_tokens and alone
    chip          each figure with its number and its source
    schemes       one object a scheme, fastest first, those that do not fit behind:
      topology, cp_size, tp_size, split, rows, key_mode, output_mode, engine (text, "" for none that we know)
      fits        whether the peak is within the chip's memory
      seconds, received (bytes), imbalance (slowest rank's own work over the mean), bound (text)
      seconds_by_part   object; it sums to seconds
      memory      weights, caches, rows, workspace, total (bytes of the largest rank)
      layers      one object a kind: name, num_layers, seconds (of one), flop, received, imbalance, parts (seconds)
    refused       objects: topology, split, rows, key_mode, output_mode, reason
    pays_from     tokens from which splitting them beats plain TP, or null
    break_even    heads_alone, num_bytes, seconds: tokens from which gather_weight beats all_to_all; or null
  with --trace, in the place of the last four:
    schemes       topology to engine as above; seconds of all steps, null where one does not fit; chosen, the steps
                  that it is best for
    steps, tokens, seconds_chosen   how many there are, and the sum of every step's best
"""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any, NamedTuple

from dsacp_npu.commands.progress import followed
from dsacp_npu.planning.chips import Chip, chip_of, presets
from dsacp_npu.planning.choice import BreakEven, Plan, break_even, pays_from, plan_of
from dsacp_npu.planning.costs import PRECISIONS, Cost, LayerCost, Planner
from dsacp_npu.planning.models import PRESETS, model_of
from dsacp_npu.planning.replay import Replay, replayed
from dsacp_npu.planning.schemes import Scheme, engine_of, named_schemes
from dsacp_npu.planning.shares import Batch, batch_of
from dsacp_ref.spec import INT32_MAX, check_int, contract_error

STEP_TOKENS = 32768
EXAMPLES = """\
examples:
  %(prog)s --query-lens 128k                                     one prompt, V4-Flash on 8 dies of a 910C
  %(prog)s --query-lens 8k 2k --computed 0 64k --ranks 16 --model v4-pro --chip 950pr
  %(prog)s --query-lens 64k --model config.json --chip chip.json --all
  %(prog)s --query-lens 1m --ranks 8 --chip h200 --plot plan.png
  %(prog)s --trace requests.csv --step-tokens 16k                prompts of a service, step by step

A chip of your own is a JSON file with the figures of dsacp_npu/planning/chips.json, each a number and its source.
"""


class Answer(NamedTuple):
    """All that is shown of one batch."""

    planner: Planner
    plan: Plan
    pays_from: int | None
    break_even: BreakEven | None


def tokens_of(text: str) -> int:
    """A number of tokens; ``128k`` is 131072 and ``1m`` 1048576."""
    found = re.fullmatch(r"([0-9]{1,10})([km]?)", text.lower())
    if not found:
        raise argparse.ArgumentTypeError(f"invalid number of tokens: {text!r}; write 131072, or 128k")
    return int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.epilog = EXAMPLES
    counts: dict[str, Any] = {"nargs": "+", "type": tokens_of, "metavar": "N"}
    batch = parser.add_argument_group("the batch, or a trace of prompts; k and m stand for 1024 and 1024 * 1024")
    batch.add_argument("--query-lens", **counts, help="new tokens of each request")
    batch.add_argument("--computed", **counts, help="cached tokens of each request (default: none)")
    batch.add_argument("--trace", metavar="FILE", help="CSV or Mooncake's JSON lines, as parity --trace takes them")
    words = "tokens of a full step of the trace (default: 32k)"
    batch.add_argument("--step-tokens", type=tokens_of, metavar="N", help=words)
    batch.add_argument("--alone", action="store_true", help="every prompt of the trace in a step of its own")
    what = parser.add_argument_group("what runs it")
    words = f"{', '.join(PRESETS)}, or a config.json (default: {PRESETS[0]})"
    what.add_argument("--model", default=PRESETS[0], metavar="NAME", help=words)
    words = f"{', '.join(presets())}, or a JSON file (default: 910c, one die)"
    what.add_argument("--chip", default="910c", metavar="NAME", help=words)
    what.add_argument("--ranks", type=int, default=8, metavar="N", help="devices (default: 8)")
    words = "w4a8: 8 bits, and 4 for weights of routed experts; w8a8; bf16 (default: as released, V4 w4a8, V3.2 w8a8)"
    what.add_argument("--precision", choices=tuple(PRECISIONS), help=words)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--all", action="store_true", help="every scheme, and every refusal with its reason")
    shown.add_argument("--json", action="store_true", help="one JSON object with everything, instead of tables")
    shown.add_argument("--plot", metavar="FILE", help="also draw it: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Plan, and print."""
    if bool(args.query_lens) == bool(args.trace):
        got = "both" if args.trace else "neither"
        raise contract_error("the batch", "be --query-lens or --trace", got, "try --query-lens 128k")
    if args.trace and args.computed:
        raise contract_error("--computed", "stand with --query-lens", "--trace", "a trace has its own cached tokens")
    if not args.trace and (args.alone or args.step_tokens is not None):
        name = "--alone" if args.alone else "--step-tokens"
        raise contract_error(name, "stand with --trace", "--query-lens", "a batch is one step")
    if args.plot is not None:
        from dsacp_npu.plots._drawing import checked_path

        checked_path(args.plot, "--plot")
    planner = Planner(model_of(args.model), chip_of(args.chip), args.precision)
    check_int("--ranks", args.ranks, 1, 4096)
    return trace_plan(args, planner) if args.trace else batch_plan(args, planner)


def batch_plan(args: argparse.Namespace, planner: Planner) -> int:
    """One batch under every scheme."""
    plan = plan_of(planner, batch_of(args.query_lens, args.computed), args.ranks)
    best = plan.best.scheme
    even = break_even(planner, best if best.cp_size > 1 else best._replace(cp_size=args.ranks, tp_size=1, rows="full"))
    answer = Answer(planner, plan, pays_from(planner, args.ranks) if args.ranks > 1 else None, even)
    if args.plot:
        from dsacp_npu.commands.plan_picture import draw_plan

        draw_plan(args.plot, answer, args.ranks)
    if args.json:
        print(json.dumps(call_of(args, planner) | words_of(answer)))
        return 0
    from dsacp_npu.commands.plan_table import show_plan

    show_plan(answer, args.ranks, everything=args.all)
    return 0


def trace_plan(args: argparse.Namespace, planner: Planner) -> int:
    """A trace, step by step, under the schemes that have names."""
    check_int("--step-tokens", step_tokens_of(args), 1, INT32_MAX)
    batches = batches_of(args.trace, step_tokens_of(args), args.alone)
    schemes = named_schemes(planner.model, args.ranks)
    if not schemes:
        raise contract_error("--ranks", f"be a number that {planner.model.name} can be shared among", args.ranks)
    replay = replayed(planner, followed(batches, len(batches), "planning steps"), schemes)
    if args.plot:
        from dsacp_npu.commands.plan_picture import draw_replay

        draw_replay(args.plot, replay)
    if args.json:
        print(json.dumps(call_of(args, planner) | words_of_replay(replay)))
        return 0
    from dsacp_npu.commands.plan_table import show_replay

    cut = f"{'each prompt alone, at most' if args.alone else 'full steps of'} {step_tokens_of(args):,}"
    show_replay(replay, planner, args.ranks, cut)
    return 0


def step_tokens_of(args: argparse.Namespace) -> int:
    """Tokens of a full step."""
    return STEP_TOKENS if args.step_tokens is None else int(args.step_tokens)


def batches_of(path: str, step_tokens: int, alone: bool) -> list[Batch]:
    """The steps of a trace: prompts in order of arrival until a step is full, or each in steps of its own."""
    from dsacp_npu.commands.parity_trace import full_steps, requests_of

    requests = requests_of(path)
    groups = [[request] for request in requests] if alone else [requests]
    steps = [step for group in groups for step in full_steps(group, step_tokens)]
    return [batch_of([s.new for s in step.shares], [s.computed for s in step.shares]) for step in steps]


# --- for programs ---


def call_of(args: argparse.Namespace, planner: Planner) -> dict[str, Any]:
    """What was asked, and what the chip is taken to do."""
    call: dict[str, Any] = {name: getattr(args, name) for name in ("model", "chip", "ranks")}
    call["precision"] = planner.precision_name
    if args.trace:
        call |= {"trace": args.trace, "step_tokens": step_tokens_of(args), "alone": args.alone}
    else:
        call |= {"query_lens": args.query_lens, "computed": args.computed or [0] * len(args.query_lens)}
    return {"schema": 1, "call": call, "chip": figures_of(planner.chip)}


def figures_of(chip: Chip) -> dict[str, list[Any]]:
    """Every figure with its source, as a chip's JSON file has it."""
    return {name: [getattr(chip, name), source] for name, source in chip.sources}


def words_of(answer: Answer) -> dict[str, Any]:
    """A plan as plain numbers and words."""
    plan = answer.plan
    return {
        "schemes": [cost_words(cost, plan.fits(cost)) for cost in plan.costs],
        "refused": [scheme_words(scheme) | {"reason": reason} for scheme, reason in plan.refused],
        "pays_from": answer.pays_from,
        "break_even": answer.break_even._asdict() if answer.break_even else None,
    }


def scheme_words(scheme: Scheme) -> dict[str, Any]:
    """A scheme's fields, its topology and the engine that runs it."""
    return {"topology": scheme.topology} | scheme._asdict() | {"engine": engine_of(scheme)}


def cost_words(cost: Cost, fits: bool) -> dict[str, Any]:
    """A scheme with all that it costs."""
    return scheme_words(cost.scheme) | {
        "fits": fits,
        "seconds": cost.seconds,
        "received": cost.received,
        "imbalance": cost.imbalance,
        "bound": cost.bound(),
        "seconds_by_part": cost.seconds_by_part(),
        "memory": cost.memory._asdict() | {"total": cost.memory.total},
        "layers": [layer_words(layer) for layer in cost.layers],
    }


def layer_words(layer: LayerCost) -> dict[str, Any]:
    """One layer of a kind."""
    return {
        "name": layer.name,
        "num_layers": layer.num_layers,
        "seconds": layer.seconds,
        "flop": int(layer.flop.max()),
        "received": layer.received,
        "imbalance": layer.imbalance,
        "parts": {name: float(seconds.max()) for name, seconds in layer.parts.items()} | {"exchange": layer.exchange},
    }


def words_of_replay(replay: Replay) -> dict[str, Any]:
    """A replay as plain numbers and words."""
    chosen = replay.chosen.tolist()
    rows = [
        scheme_words(scheme) | {"seconds": seconds if math.isfinite(seconds) else None, "chosen": chosen.count(index)}
        for index, (scheme, seconds) in enumerate(zip(replay.schemes, replay.fixed.tolist(), strict=True))
    ]
    counts = {"steps": len(replay.tokens), "tokens": int(replay.tokens.sum())}
    return {"schemes": rows} | counts | {"seconds_chosen": float(replay.best.sum())}
