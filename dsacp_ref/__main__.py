"""The command line of the definition: ``python -m dsacp_ref explain`` shows a partition and its extents.

The numbers are the library's: `explanation` keeps what it returns, the tables print that, and ``--json`` writes the
same as one object. Its keys, where every number is an int and [n] is the library's int32 array as a list::

    schema                1; it counts up when a key goes or changes its meaning
    call                  the call, with all defaults: query_start_loc, seq_lens, cp_size, split (text), causal (bool),
                          empty_extent (text), num_input_tokens and compress_ratio (null: not given)
    num_tokens            new tokens of the batch
    num_tokens_pad        rows of all ranks together, pad rows included
    rows_per_rank         [cp_size]
    restore_indices       [num_tokens] where each token lies in the ranks' rows laid end to end
    ranks                 one object per rank; with --rank that rank alone
      cp_rank             the rank
      token_indices       [rows] flat global token, -1 for a pad row
      positions           [rows] position in the request, -1 for a pad row and in a padded graph slot
      request_indices     [operator rows] the request, -1 for a round-robin pad row
      piece_starts        [operator rows] offset in the request's new tokens; piece_ends likewise, exclusive
      piece_rows          [operator rows] local rows that the piece takes, pad rows included
      cu_seqlens_q        [operator rows + 1] query offsets; pad rows are no queries
      seqused_kv          [operator rows] right-aligned key extents
      local_kv_start_loc  [operator rows + 1] of the split contiguous only
      visible_entries     [rows] with --compress-ratio only: compressed entries that the query sees, 0 for a pad row
"""

from __future__ import annotations

import argparse
import io
import json
import os
import string
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

import dsacp_ref
from dsacp_ref._arguments import Parser
from dsacp_ref.config import SPLITS, split_rule
from dsacp_ref.extents import EMPTY_EXTENTS, build_cp_local_metadata, checked_offsets, local_extents, token_positions
from dsacp_ref.partition import Int32, checked_ranks, partition_tokens, rank_pieces
from dsacp_ref.spec import INT32_MAX, ContractError, check_int, contract_error
from dsacp_ref.visibility import visible_entries

WIDTH = 100  # columns
MOST_LINES = 24  # of one table
SIGNS = string.digits + string.ascii_letters  # one per rank in the picture

DEFAULTS = {"causal": True, "empty_extent": "zero", "num_input_tokens": None, "compress_ratio": None}
RULE_WORDS = {
    "contiguous": "the flat stream in equal slices",
    "contiguous_request": "each request in slices of ceil(q / {ranks})",
    "zigzag": "blocks r and {last}-r of a request to rank r",
    "zigzag_ceil": "blocks r and {last}-r of a request to rank r, the last blocks short",
    "zigzag_padded": "blocks r and {last}-r of a request to rank r, all padded to one size",
    "round_robin": "flat token t to rank t mod {ranks}",
    "round_robin_page": "page b of a request to rank b mod {ranks}",
}

EXAMPLES = """\
examples:
  %(prog)s --query-lens 1 2 3 --computed 0 4 0 --cp-size 3
  %(prog)s --query-start-loc 0 1 3 6 --seq-lens 1 6 3 --cp-size 3    (the same batch)
  %(prog)s --query-lens 5 9 --cp-size 2 --split zigzag --compress-ratio 4
  %(prog)s --query-lens 10 --cp-size 4 --split round_robin --rank 1 --json
"""


def add_arguments(explain: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    explain.description = (
        "Show who owns which token of a batch, and the rows that every rank hands an attention operator."
    )
    explain.epilog = EXAMPLES
    counts: dict[str, Any] = {"nargs": "*", "type": int, "metavar": "N"}
    batch = explain.add_argument_group("the batch, in one of two spellings; an empty batch has no numbers")
    batch.add_argument("--query-lens", **counts, help="new tokens of each request")
    batch.add_argument("--computed", **counts, help="cached tokens of each request (default: none)")
    batch.add_argument("--query-start-loc", **counts, help="cumulative new tokens, first 0")
    batch.add_argument("--seq-lens", **counts, help="all tokens of each request; 0 for a padded graph slot")
    rule = explain.add_argument_group("the split")
    rule.add_argument("--cp-size", type=int, required=True, metavar="R", help="ranks that share the tokens")
    names = ", ".join(name + "(PAGE_SIZE)" * (name == "round_robin_page") for name in SPLITS)
    rule.add_argument("--split", default="contiguous", metavar="RULE", help=f"{names} (default: contiguous)")
    rule.add_argument("--num-input-tokens", type=int, metavar="N", help="rows of the stream with its graph padding")
    words = f"key extent of a row without queries: {' or '.join(EMPTY_EXTENTS)} (default: zero)"
    rule.add_argument("--empty-extent", default="zero", metavar="WORD", help=words)
    rule.add_argument("--non-causal", action="store_true", help="every row with queries gets its whole request")
    shown = explain.add_argument_group("what is shown")
    shown.add_argument("--rank", type=int, metavar="R", help="this rank only (default: all)")
    words = "also how many compressed entries the first and the last query of each row see"
    shown.add_argument("--compress-ratio", type=int, metavar="N", help=words)
    shown.add_argument("--json", action="store_true", help="one JSON object instead of tables, with nothing left out")


def batch_of(args: argparse.Namespace) -> tuple[Int32, Int32]:
    """query_start_loc and seq_lens of either spelling; a mixture is refused."""
    names = ("query_lens", "computed", "query_start_loc", "seq_lens")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if tuple(given) not in (names[:1], names[:2], names[2:]):
        got = " ".join("--" + name.replace("_", "-") for name in given) or "neither"
        rule = "be spelled --query-lens with or without --computed, or --query-start-loc with --seq-lens"
        raise contract_error("the batch", rule, got)
    for name, numbers in given.items():
        for number in numbers:
            check_int(name, number, 0, INT32_MAX)
    if "query_start_loc" in given:
        return np.array(args.query_start_loc, np.int32), np.array(args.seq_lens, np.int32)
    query_lens = given["query_lens"]
    computed = given.get("computed", [0] * len(query_lens))
    if len(computed) != len(query_lens):
        raise contract_error("computed", f"have {len(query_lens)} entries", len(computed), "one per request")
    hint = "it is query_lens plus computed"
    seq_lens = [check_int("seq_lens", sum(pair), 0, INT32_MAX, hint) for pair in zip(query_lens, computed, strict=True)]
    return checked_offsets("query_lens", np.array(query_lens, np.int32)), np.array(seq_lens, np.int32)


def explanation(args: argparse.Namespace) -> dict[str, Any]:
    """All that is shown, for every rank, under the keys that the module's text lists."""
    query_start_loc, seq_lens = batch_of(args)
    cp_size, ratio = args.cp_size, args.compress_ratio
    if ratio is not None and args.non_causal:
        hint = "which entries a query sees is a causal rule; a draft layer has only a window"
        raise contract_error("compress_ratio", "be left out when causal is False", ratio, hint)
    padding = {"num_input_tokens": args.num_input_tokens}
    rule = {"split": str(split_rule(args.split))} | padding
    mask = {"causal": not args.non_causal, "empty_extent": args.empty_extent}
    partition = partition_tokens(query_start_loc, cp_size, **rule)
    ranks = []
    for cp_rank, token_indices in enumerate(partition.token_indices):
        positions = token_positions(token_indices, query_start_loc, seq_lens)
        arrays: dict[str, Int32] = {"token_indices": token_indices, "positions": positions}
        arrays |= rank_pieces(query_start_loc, cp_size, cp_rank, **rule)._asdict()
        arrays |= local_extents(query_start_loc, seq_lens, cp_size, cp_rank, **rule, **mask)._asdict()
        if rule["split"] == "contiguous":
            local = build_cp_local_metadata(query_start_loc, seq_lens, cp_size, cp_rank, None, None, **padding, **mask)
            arrays["local_kv_start_loc"] = local.local_kv_start_loc
        if ratio is not None:
            arrays["visible_entries"] = visible_entries(positions, ratio)
        ranks.append({"cp_rank": cp_rank} | {name: array.tolist() for name, array in arrays.items()})
    call = {"query_start_loc": query_start_loc.tolist(), "seq_lens": seq_lens.tolist(), "cp_size": cp_size}
    rows_per_rank = [len(token_indices) for token_indices in partition.token_indices]
    return {
        "schema": 1,
        "call": call | rule | mask | {"compress_ratio": ratio},
        "num_tokens": len(partition.restore_indices),
        "num_tokens_pad": sum(rows_per_rank),
        "rows_per_rank": rows_per_rank,
        "restore_indices": partition.restore_indices.tolist(),
        "ranks": ranks,
    }


def columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns under their heading; a long table loses its middle."""
    hidden = 0 if len(cells) <= MOST_LINES else len(cells) - MOST_LINES + 1
    bottom = len(cells) if not hidden else len(cells) - 4
    kept = [*cells[: bottom - hidden], *cells[bottom:]]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    lines = ["  " + "  ".join(map(str.rjust, row, widths)).rstrip() for row in kept]
    if hidden:
        lines.insert(bottom - hidden, f"  … {hidden} lines left out; --json has them")
    return lines


def cut(signs: str, width: int) -> str:
    """One sign per token, made to fit: long runs of one rank lose their middle, then the whole does."""
    if len(signs) > width:
        runs = ["".join(run) for _, run in groupby(signs)]
        keep = max(3, width // len(runs))
        half = (keep - 1) // 2
        signs = "".join(run if len(run) <= keep else f"{run[:half]}…{run[-half:]}" for run in runs)
    half = (width - 1) // 2
    return signs if len(signs) <= width else f"{signs[:half]}…{signs[-half:]}"


def listed(name: str, values: list[int]) -> str:
    """A named array on one line; a long one loses its middle."""
    label, text = f"  {name:<18}  ", " ".join(map(str, values)) or "(none)"
    if len(label + text) > WIDTH:
        note = f"  ({len(values)} numbers)"
        half = (WIDTH - len(label + note) - 3) // 2
        text = f"{text[:half].rpartition(' ')[0]} … {text[-half:].partition(' ')[2]}{note}"
    return label + text


def picture(shown: dict[str, Any]) -> list[str]:
    """One line per request, one sign per new token: the rank that owns it. Pad rows stand behind."""
    query_start_loc, seq_lens, cp_size = (shown["call"][key] for key in ("query_start_loc", "seq_lens", "cp_size"))
    if cp_size > len(SIGNS):
        return [f"  (no picture: it has signs for {len(SIGNS)} ranks)"]
    owners = np.repeat(np.arange(cp_size), shown["rows_per_rank"])[shown["restore_indices"]].tolist()
    signs = "".join(SIGNS[owner] for owner in owners)
    rows = np.zeros(len(seq_lens) + 1, np.int64)  # of each request; the last entry takes what has request -1
    for rank in shown["ranks"]:
        np.add.at(rows, np.array(rank["request_indices"], np.int32), rank["piece_rows"])
    width = WIDTH - 32  # what the numbers before it leave
    cells = []
    for request, (start, stop) in enumerate(pairwise(query_start_loc)):
        drawing = cut(signs[start:stop].ljust(rows[request], "."), width)
        cells.append((str(request), str(stop - start), str(seq_lens[request]), drawing))
    if beyond := shown["num_tokens_pad"] - int(rows[:-1].sum()):
        cells.append(("padding", str(beyond), "-", cut("." * beyond, width)))
    if not cells:
        return ["  (no requests)"]
    drawn = "".join(cell[-1] for cell in cells)
    legend = "each new token: its rank" + ", . a pad row" * ("." in drawn) + ", … cut here" * ("…" in drawn)
    legend += f", {SIGNS[10]} is rank 10" * (cp_size > 10)
    return columns([(*cell[:-1], cell[-1].ljust(width)) for cell in (("request", "new", "seq_len", legend), *cells)])


def rank_table(rank: dict[str, Any]) -> list[str]:
    """One rank: its operator rows, then the arrays as an operator takes them."""
    queries = [row for row, token in enumerate(rank["token_indices"]) if token >= 0]
    heading = ["row", "request", "new tokens", "positions", "q_len", "seqused_kv"]
    cells = [heading + ["entries seen"] * ("visible_entries" in rank)]
    for row, (first, stop) in enumerate(pairwise(rank["cu_seqlens_q"])):
        request, start, end = (rank[key][row] for key in ("request_indices", "piece_starts", "piece_ends"))
        line = [str(row), "pad", "-"] if request < 0 else [str(row), str(request), f"[{start},{end})"]
        ends = [queries[first], queries[stop - 1]] if stop > first else []
        places = [rank["positions"][query] for query in ends if rank["positions"][query] >= 0]  # graph slots have none
        line += [f"[{places[0]},{places[1] + 1})" if places else "-", str(stop - first), str(rank["seqused_kv"][row])]
        if "visible_entries" in rank:
            line.append(" to ".join(str(rank["visible_entries"][query]) for query in ends) or "-")
        cells.append(line)
    num_rows = len(rank["token_indices"])
    lines = [f"rank {rank['cp_rank']} (rows {num_rows}, pad rows {num_rows - len(queries)})"]
    if len(cells) > MOST_LINES and (idle := sum(line[4] == "0" for line in cells)):
        cells = [line for line in cells if line[4] != "0"]
        lines.append(f"  … {idle} rows without queries left out; --json has them")
    lines += columns(cells) if rank["seqused_kv"] else ["  (no operator rows)"]
    arrays = ("token_indices", "cu_seqlens_q", "seqused_kv", "local_kv_start_loc")
    return lines + [listed(name, rank[name]) for name in arrays if name in rank]


def table(shown: dict[str, Any], ranks: list[dict[str, Any]]) -> str:
    """The text for people: the call, the picture, a block per rank, the way back."""
    call, rows = shown["call"], shown["rows_per_rank"]
    cp_size, rule = call["cp_size"], call["split"]
    words = RULE_WORDS[split_rule(rule).name].format(last=2 * cp_size - 1, ranks=cp_size)
    some_rows = "-".join(str(count) for count in sorted({min(rows), max(rows)}))
    numbers = f"tokens {shown['num_tokens']}, padded {shown['num_tokens_pad']}, rows per rank {some_rows}"
    options = [f"{name} {call[name]}" for name, default in DEFAULTS.items() if call[name] != default]
    words, numbers = f"{rule}, cp_size {cp_size}: {words}", ", ".join([numbers, *options])
    header = f"{words}; {numbers}"
    if len(header) > WIDTH:
        header = f"{words};\n" + textwrap.fill(numbers, WIDTH, initial_indent="  ", subsequent_indent="  ")
    blocks = [[header], picture(shown), *map(rank_table, ranks), [listed("restore_indices", shown["restore_indices"])]]
    return "\n\n".join("\n".join(block) for block in blocks)


def run(args: argparse.Namespace) -> int:
    """Print the explanation and return the exit code."""
    shown = explanation(args)
    ranks = shown["ranks"] if args.rank is None else [shown["ranks"][checked_ranks(args.cp_size, args.rank)[1]]]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal has the sign for what is left out
    print(json.dumps(shown | {"ranks": ranks}) if args.json else table(shown, ranks), flush=True)
    return 0


def parser() -> Parser:
    """The command line, whose one command knows its own parser."""
    top = Parser(prog="python -m dsacp_ref", description="The definition of context-parallel sparse attention.")
    top.add_argument("--version", action="version", version=f"dsacp {dsacp_ref.__version__}")
    words = "show who owns which token, and the operator rows of every rank"
    explain = top.add_subparsers(dest="command", metavar="command").add_parser("explain", help=words)
    add_arguments(explain)
    explain.epilog = (
        f"{explain.epilog}\n`python -m dsacp_npu explain` takes --plot FILE as well, and draws the batch.\n"
    )
    explain.set_defaults(parser=explain)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, 2 for a call that breaks a contract."""
    top = parser()
    args, unknown = top.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", top).error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        top.print_help()
        return 0
    try:
        return run(args)
    except ContractError as error:
        print(f"dsacp_ref explain: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough; what is still buffered must not fail again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
