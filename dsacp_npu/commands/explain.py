"""``python -m dsacp_npu explain``: the definition's own command, beside the others, and its picture."""

from __future__ import annotations

import argparse

from dsacp_npu import plots
from dsacp_npu.plots._drawing import checked_path
from dsacp_ref.__main__ import add_arguments as add_shared_arguments
from dsacp_ref.__main__ import batch_of
from dsacp_ref.__main__ import run as show

__all__ = ["add_arguments", "run"]


def add_arguments(explain: argparse.ArgumentParser) -> None:
    """The definition's options, and where to draw."""
    add_shared_arguments(explain)
    words = "also draw it, as .png, .svg or .pdf: queries x keys, coloured by rank"
    explain.add_argument("--plot", metavar="FILE", help=words)
    explain.epilog = f"{explain.epilog}  %(prog)s --query-lens 12 6 --cp-size 4 --split zigzag --plot batch.png\n"


def run(args: argparse.Namespace) -> int:
    """Draw the batch if that is asked for, print the explanation, and return the exit code."""
    if args.plot is not None:
        draw(args)
    return show(args)


def draw(args: argparse.Namespace) -> None:
    """The picture of the same call as a file."""
    path = checked_path(args.plot, "--plot")
    query_start_loc, seq_lens = batch_of(args)
    figure = plots.partition_picture(
        query_start_loc,
        seq_lens,
        args.cp_size,
        split=args.split,
        num_input_tokens=args.num_input_tokens,
        causal=not args.non_causal,
        compress_ratio=args.compress_ratio,
        cp_rank=args.rank,
    )
    plots.saved(figure, path)
