"""The step itself: global lengths, which everything else is measured by. All ranks must tell the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.validation.core import Check, Finding, cause, told
from dsacp_npu.validation.reading import Dump
from dsacp_npu.validation.view import Place, View
from dsacp_ref.extents import check_batch, local_extents
from dsacp_ref.partition import Int32
from dsacp_ref.spec import ContractError

__all__ = ["NAME", "TITLE", "batch_of"]

NAME = "batch"
TITLE = "query_start_loc and seq_lens are those of a step, the same on every rank"
Lengths = tuple[Int32, Int32]


def batch_of(dump: Dump) -> tuple[Lengths | None, list[Finding]]:
    """The lengths that most ranks tell, and what others tell instead; None where no rank's can be."""
    told_by = {
        rank: (tensors["query_start_loc"].array, tensors["seq_lens"].array)
        for rank, tensors in dump.ranks.items()
        if {"query_start_loc", "seq_lens"} <= tensors.keys()
    }
    legal = {rank: lengths for rank, lengths in told_by.items() if not complaint(*lengths)}
    repaired = {rank: found for rank, lengths in told_by.items() if (found := repair(*lengths)) is not None}
    usable = legal or {rank: lengths for rank, (_, lengths) in repaired.items()}
    if not usable:
        return None, [unusable(rank, *lengths) for rank, lengths in told_by.items()]
    votes = Counter(fingerprint(lengths) for lengths in usable.values())
    most = max(votes.values())
    candidates = [lengths for lengths in usable.values() if votes[fingerprint(lengths)] == most]
    right = candidates[0] if len({fingerprint(each) for each in candidates}) == 1 else longest(candidates)
    findings = []
    for rank, lengths in told_by.items():
        for name, got, due in zip(("query_start_loc", "seq_lens"), lengths, right, strict=True):
            if not np.array_equal(got, due):
                findings.append(differing(dump, rank, name, got, due, right))
    return right, findings


def longest(candidates: list[Lengths]) -> Lengths:
    """Of lengths that disagree, those of most tokens: local ones are shorter than global ones."""
    return max(candidates, key=lambda lengths: (int(lengths[0][-1]), int(lengths[1].sum())))


def fingerprint(lengths: Lengths) -> tuple[bytes, bytes]:
    """Two sets of lengths are the same if theirs are."""
    return lengths[0].tobytes(), lengths[1].tobytes()


def complaint(query_start_loc: Int32, seq_lens: Int32) -> str:
    """Why these cannot be the lengths of a step; empty if they can."""
    try:
        check_batch(query_start_loc, seq_lens)
    except ContractError as error:
        return str(error)
    return ""


def repair(query_start_loc: Int32, seq_lens: Int32) -> tuple[str, Lengths] | None:
    """The lengths that were meant, and the fault that made these of them; None where no known one did."""
    for kind, loc in (
        ("leading_zero_missing", np.concatenate([[0], query_start_loc])),
        ("lengths_not_cumulative", np.concatenate([[0], np.cumsum(query_start_loc)])),
    ):
        lengths = loc.astype(np.int32), seq_lens
        if not complaint(*lengths):
            return kind, lengths
    return None


def unusable(rank: int, query_start_loc: Int32, seq_lens: Int32) -> Finding:
    """The finding where nothing can be made of the lengths."""
    got = f"{told(query_start_loc)}; seq_lens {told(seq_lens)}"
    expected = complaint(query_start_loc, seq_lens)
    size = len(query_start_loc)
    return Finding(NAME, "query_start_loc", rank, None, None, (), expected, got, size, size, ())


def differing(dump: Dump, rank: int, name: str, got: NDArray[Any], due: NDArray[Any], right: Lengths) -> Finding:
    """The finding of a rank that tells other lengths than are right."""
    causes = tuple(cause(kind) for kind, made in hypotheses(dump, rank, name, right) if np.array_equal(made, got))
    if got.shape != due.shape:
        return Finding(NAME, name, rank, None, None, (), told(due), told(got), len(due), len(due), causes)
    apart = np.flatnonzero(got != due)
    at = int(apart[0])
    request = max(at - 1, 0) if name == "query_start_loc" else at
    return Finding(NAME, name, rank, request, None, (at,), int(due[at]), int(got[at]), len(apart), len(due), causes)


def hypotheses(dump: Dump, rank: int, name: str, right: Lengths) -> list[tuple[str, NDArray[Any]]]:
    """What a rank may have told instead."""
    loc, lens = right
    found: list[tuple[str, NDArray[Any]]] = []
    if name == "query_start_loc":
        found += [("leading_zero_missing", loc[1:]), ("lengths_not_cumulative", np.diff(loc))]
    else:
        found += [
            ("offsets_for_lengths", np.concatenate([[0], np.cumsum(lens)])),
            ("offsets_for_lengths", np.cumsum(lens)),
        ]
        found.append(("prefix_lost", np.diff(loc)))
    settings = dump.settings
    if {"cp_size", "split"} <= settings.keys():
        try:
            local = local_extents(
                loc,
                lens,
                settings["cp_size"],
                rank,
                split=settings["split"],
                num_input_tokens=settings.get("num_input_tokens"),
                causal=settings["causal"],
                empty_extent=settings["empty_extent"],
            )
        except ContractError:
            return found
        if name == "query_start_loc":
            found.append(("local_query_offsets", local.cu_seqlens_q))
        else:
            found.append(("local_key_lengths", local.seqused_kv))
    return found


def place(view: View, index: tuple[int, ...]) -> Place:
    """Of a request."""
    return view.place_of_request(index)


# For the table of checks; `batch_of` makes the comparison, because every other check needs its result.
CHECK = Check(NAME, "query_start_loc", TITLE, ("seq_lens",), lambda view: view.query_start_loc, place, local=False)
