"""How evenly splits share the work of a layer, from every rank's plan, and what the ranks of a V3.2 layer receive.

A section of `bench`, in which nothing is timed and nothing computed: all is counted (`counted`), so it needs no device
and no processes. Batches are one long request at a time and, from a trace of a real service, prompts in order of
arrival until a step is full. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from dsacp_npu._tensors import Int32, torch
from dsacp_npu.commands.counted import Work, imbalance, mla_received_bytes, mla_work_of_ranks, work_of_ranks
from dsacp_npu.commands.parity_trace import DrawnStep, full_steps, requests_of
from dsacp_ref.config import v4_flash
from dsacp_ref.mla_config import v32

SPLITS = ("contiguous", "zigzag", "round_robin")
RANKS = (2, 4, 8)
LENGTHS = (8192, 32768, 131072)
TOKEN_BUDGET = 32768  # new tokens a step of the trace
BATCHES = 256  # most that are counted, from all over the trace

Batch = tuple[Int32, Int32]  # query_start_loc, seq_lens


class Counted(NamedTuple):
    """One figure: whose work, by which split, over how many ranks."""

    work: str
    split: str
    cp_size: int


class Layer(NamedTuple):
    """A kind of layer: its name, how its work is counted, and whether it has an indexer."""

    name: str
    work_of_ranks: Callable[..., Work]
    has_indexer: bool


LAYERS = (
    Layer("V3.2", partial(mla_work_of_ranks, config=v32()), True),
    Layer("V4-Flash, ratio 1", partial(work_of_ranks, config=v4_flash(), compress_ratio=1), False),
    Layer("V4-Flash, ratio 4", partial(work_of_ranks, config=v4_flash(), compress_ratio=4), True),
    Layer("V4-Flash, ratio 128", partial(work_of_ranks, config=v4_flash(), compress_ratio=128), False),
)

EXPERTS = ("whole", "split", "sliced")


# --- the tables ---


def splits(trace: str | None) -> None:
    """Every kind of work by every split over every number of ranks, for long requests, then batches of the trace."""
    steps = full_steps(requests_of(trace), TOKEN_BUDGET) if trace else []
    print("splits: work of the busiest rank over the mean of all, counted from every rank's plan")
    print(f"  attention: keys that queries attend to (V3.2: of at most {v32().index_topk} tokens chosen)")
    print("  indexer: keys that queries are scored against")
    for tokens in LENGTHS:
        figures = evenness([one_request(tokens)])
        table(f"one request of {tokens} tokens, no prefix", {key: found[0] for key, found in figures.items()})
    traffic()
    if steps:
        drawn = drawn_evenly(steps, BATCHES)
        figures = evenness([batch_of(step) for step in drawn])
        about = (
            f"of {len(drawn)} batches from {len(steps)} in the trace, {TOKEN_BUDGET} new tokens each behind prefixes"
        )
        table(f"median {about}", {key: median(found) for key, found in figures.items()})
        table("worst of them, each figure's own", {key: max(found) for key, found in figures.items()})


def table(title: str, figures: dict[Counted, float]) -> None:
    """One line a kind of work, a column for each split and number of ranks."""
    works = dict.fromkeys(counted.work for counted in figures)
    columns = [(split, cp_size) for split in SPLITS for cp_size in RANKS]
    print(f"\n  {title}")
    print(f"    {'':31s}" + "".join(f"{split:>{8 * len(RANKS)}s}" for split in SPLITS))
    print(f"    {'ranks':31s}" + "".join(f"{cp_size:8d}" for _, cp_size in columns))
    for work in works:
        print(f"    {work:31s}" + "".join(f"{figures[Counted(work, *column)]:8.3f}" for column in columns))


def traffic() -> None:
    """One line a flow, a column for each length and number of ranks."""
    columns = [(tokens, cp_size) for tokens in LENGTHS for cp_size in RANKS]
    figures = [received(*column) for column in columns]
    print("\n  MB that a rank receives in a V3.2 layer, bfloat16, one request by zigzag, rows scattered")
    print(f"    {'tokens':31s}" + "".join(f"{tokens:{8 * len(RANKS)}d}" for tokens in LENGTHS))
    print(f"    {'ranks':31s}" + "".join(f"{cp_size:8d}" for _, cp_size in columns))
    for flow in figures[0]:
        print(f"    {flow:31s}" + "".join(f"{figure[flow] / 1e6:8.1f}" for figure in figures))


# --- counting ---


def evenness(batches: Sequence[Batch]) -> dict[Counted, list[float]]:
    """The busiest rank's work over the mean, in every batch; 1 where there is none."""
    figures: dict[Counted, list[float]] = {}
    for batch in batches:
        for layer in LAYERS:
            for split in SPLITS:
                for cp_size in RANKS:
                    for name, shares in works_of(layer, batch, split, cp_size).items():
                        figure = imbalance(shares) if any(shares) else 1.0
                        figures.setdefault(Counted(f"{layer.name}, {name}", split, cp_size), []).append(figure)
    return figures


def works_of(layer: Layer, batch: Batch, split: str, cp_size: int) -> dict[str, list[int]]:
    """What every rank does, by kind of work."""
    work = layer.work_of_ranks(*batch, cp_size, split=split)
    return {"indexer": work.scores, "attention": work.keys} if layer.has_indexer else {"attention": work.keys}


def received(num_tokens: int, cp_size: int) -> dict[str, int]:
    """Bytes of every flow on one rank; rows travel padded to the largest count, so it is the same on all."""
    query_start_loc, _ = one_request(num_tokens)

    def calls(experts: str, *, fp8: bool = False) -> list[int]:
        where = (query_start_loc, cp_size, 0, v32())
        found = mla_received_bytes(*where, dtype=torch.bfloat16, split="zigzag", experts=experts, fp8=fp8)
        return [call.num_bytes for call in found]

    shared = {experts: calls(experts) for experts in EXPERTS}
    keys, *_, last = shared["whole"]
    travels = {f"experts, {experts}": sum(bytes_of[1:-1]) for experts, bytes_of in shared.items()}
    return {"keys": keys, "keys, FP8 caches": calls("whole", fp8=True)[0], **travels, "last row": last}


# --- batches ---


def one_request(num_tokens: int) -> Batch:
    """The lengths of one prompt without a prefix."""
    return torch.tensor([0, num_tokens], dtype=torch.int32), torch.tensor([num_tokens], dtype=torch.int32)


def batch_of(step: DrawnStep) -> Batch:
    """The lengths of a step as tensors."""
    query_start_loc, seq_lens = step.arrays()
    return torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens)


def drawn_evenly(steps: Sequence[DrawnStep], most: int) -> Sequence[DrawnStep]:
    """Every n-th step, so many that they are at most ``most``."""
    return steps[:: -(-len(steps) // most)]
