"""Hidden rows between attention layers, where each rank may hold its own alone (``dsa_cp_rows`` ``"scattered"``).

::

    embedding -- own_rows --> norm, attention, residual, norm -- split_experts --> residual ... -- last_rows --> head
                              on own rows                        all rows, then                    one row
                                                                 a share back                      a request

Norms, residual, routers and experts that are whole on each rank work on own rows as they are. The functions here are
for the places where rows must meet. In a step that does not split tokens, and with rows ``"full"``, each rank has all
rows; the same calls are right there, so model code needs no branch.

Every rank makes the same calls in the same order, rows or none.
"""

from __future__ import annotations

from collections.abc import Callable

from dsacp_npu import distributed, distributed_block
from dsacp_npu._tensors import Float, check_tensor, dtype_name, torch
from dsacp_npu.exchange import check_shard
from dsacp_npu.parallel import Parallel
from dsacp_npu.partition import spread_rows
from dsacp_npu.step import RowLayout
from dsacp_ref.spec import check_record, contract_error

__all__ = ["gathered_rows", "last_rows", "own_rows", "split_experts"]


def own_rows(stream: torch.Tensor, step: RowLayout) -> torch.Tensor:
    """This rank's rows of something that every rank has for all tokens, such as token ids or embeddings.

    Args:
        stream: any dtype [num_tokens or more, ...], by token of the step.
        step: StepMetadata or MLAStep.

    Returns:
        array [step.num_rows, ...], zero in pad rows.

    Raises:
        ContractError: fewer rows than tokens.
    """
    check_record("step", step, RowLayout)
    check_shard(stream, 0)
    if len(stream) < step.num_tokens:
        hint = "every rank has the whole stream here"
        raise contract_error("stream", f"have the step's {step.num_tokens} tokens", len(stream), hint)
    return spread_rows(stream, step.token_indices)


def gathered_rows(rows: torch.Tensor, step: RowLayout, parallel: Parallel) -> torch.Tensor:
    """All tokens' rows on every rank, in the order of the step.

    Args:
        rows: any dtype [step.num_rows, ...], this rank's.
        step: StepMetadata or MLAStep.
        parallel: Parallel of the layers that the step was made for.

    Returns:
        array [num_tokens, ...].

    Raises:
        ContractError: another number of rows.
    """
    check_rows(rows, step, parallel)
    if not scattered(step, parallel):
        return rows[: step.num_tokens]
    return distributed.gathered_in_order(rows, parallel.cp, step.partition)  # type: ignore[arg-type]  # of a split


def last_rows(rows: torch.Tensor, step: RowLayout, parallel: Parallel) -> torch.Tensor:
    """Each request's last new row on every rank; only these travel.

    Args:
        rows: any dtype [step.num_rows, ...], this rank's.
        step: StepMetadata or MLAStep.
        parallel: Parallel of the layers that the step was made for.

    Returns:
        array [num_reqs, ...], in the order of the step; zero for a request without new tokens.

    Raises:
        ContractError: another number of rows.
    """
    check_rows(rows, step, parallel)
    starts = step.query_start_loc
    if scattered(step, parallel):
        group = (parallel.cp, step.partition)  # neither is None in a split
        return distributed_block.gathered_last_rows(rows, *group, starts)  # type: ignore[arg-type]
    ends = torch.where(starts[1:] > starts[:-1], starts[1:] - 1, -1)
    return spread_rows(rows, ends)


def split_experts(rows: Float, step: RowLayout, parallel: Parallel, expert: Callable[[Float], Float]) -> Float:
    """The output of an expert layer whose weights are split over the CP ranks, for this rank's rows.

    Ranks hold different rows, so none may be summed as they are: rows are gathered before, and shared out after.

    Args:
        rows: float [step.num_rows, hidden], this rank's.
        step: StepMetadata or MLAStep.
        parallel: Parallel of the layers that the step was made for.
        expert: what this rank's share of the weights makes of any rows: a summand of the output, row by row.

    Returns:
        float [step.num_rows, hidden].

    Raises:
        ContractError: another number of rows, from the caller or from ``expert``.
    """
    check_rows(rows, step, parallel)
    ranks = parallel.cp
    if ranks is None:
        return made_by(expert, rows)
    if not scattered(step, parallel):
        return distributed.all_reduce(made_by(expert, rows), ranks)
    counts = [len(tokens) for tokens in step.partition.token_indices]  # type: ignore[union-attr]  # of a split
    pad = (step.token_indices < 0)[:, None].to(rows.device)
    return distributed.reduce_scatter(
        made_by(expert, distributed.all_gather(rows.masked_fill(pad, 0), ranks, counts)), ranks, counts
    ).masked_fill(pad, 0)


def scattered(step: RowLayout, parallel: Parallel) -> bool:
    """Whether a rank's rows in this step are its own alone."""
    return step.splits and parallel.options.dsa_cp_rows == "scattered"


def made_by(expert: Callable[[Float], Float], rows: Float) -> Float:
    """What the expert makes, a row for each."""
    made = expert(rows)
    check_tensor("expert's output", made, (dtype_name(rows),), tuple(rows.shape), "a row for each that it gets")
    return made


def check_rows(rows: torch.Tensor, step: RowLayout, parallel: Parallel) -> None:
    """Refuse rows that are not laid out by the step."""
    check_record("step", step, RowLayout)
    check_record("parallel", parallel, Parallel)
    check_shard(rows, parallel.cp_rank)
    if len(rows) != step.num_rows:
        hint = "rows of the step that the layers run"
        raise contract_error("rows", f"be this rank's {step.num_rows}", len(rows), hint)
