"""Launches of the top-k: chunks held and read anew, ties at the edge, rows that see nothing, NaN behind their ends.

The kernels of a GPU's way are cases of their own: see GPU_CASES.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dsacp_npu.kernels.topk import candidates_kernel, chosen_scores_kernel, sorted_kernel
from dsacp_ref.indexer import selected_entries
from tests.compare import assert_same
from tests.kernels.case import Case

LEAST = float(np.finfo(np.float32).min)
SPECIAL = [0.0, -0.0, 1e-42, -1e-42, 1.0, LEAST, float("nan"), float("inf"), float("-inf")]


def random_rows(num_rows: int, num_columns: int) -> torch.Tensor:
    """Rows with hardly a tie, of small and large numbers."""
    return torch.randn(num_rows, num_columns) * 10.0 ** torch.randint(-30, 30, (num_rows, 1))


def special_rows(num_rows: int, num_columns: int) -> torch.Tensor:
    """Rows of few distinct numbers: infinities, NaN, both zeros, and numbers around them."""
    return torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (num_rows, num_columns))]


def equal_rows(num_rows: int, num_columns: int) -> torch.Tensor:
    """Rows of one number, a row of -inf and a row of NaN among them."""
    numbers = torch.tensor([2.0, -torch.inf, torch.nan, torch.inf])[torch.arange(num_rows) % 4]
    return numbers[:, None].expand(num_rows, num_columns).clone()


def neighbour_rows(num_rows: int, num_columns: int) -> torch.Tensor:
    """Rows of two neighbouring float32 numbers in turn, the higher one seldom."""
    low = torch.full((num_rows, num_columns), 1.5)
    return torch.where(torch.arange(num_columns) % 3 == 0, torch.nextafter(low, 2 * low), low)


def rows_and_counts(
    make: Callable[[int, int], torch.Tensor], num_rows: int, num_columns: int, stride: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A buffer of this stride, the columns of it that are rows, and how many each row sees: all, none, any number."""
    torch.manual_seed(num_rows * num_columns)
    buffer = torch.full((num_rows, stride), torch.inf)
    buffer[:, :num_columns] = make(num_rows, num_columns)
    visible = torch.randint(0, num_columns + 1, (num_rows,), dtype=torch.int32)
    visible[0], visible[-1] = num_columns, 0
    hidden = torch.arange(num_columns) >= visible[:, None]
    buffer[:, :num_columns].masked_fill_(hidden, torch.nan)
    return buffer, buffer[:, :num_columns], visible


def reference(rows: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The reference's choice, with numpy's view of these rows."""
    return torch.from_numpy(selected_entries(rows.numpy(), visible.numpy(), k))


def choosing(
    make: Callable[[int, int], torch.Tensor], num_rows: int, num_columns: int, k: int, chunk: int, *, held: bool
) -> Case:
    """All but the chosen scores made -inf, rows lying apart."""
    buffer, rows, visible = rows_and_counts(make, num_rows, num_columns, num_columns + 5)
    kept = torch.full((num_rows, num_columns), 77.0)

    def check() -> None:
        want = torch.full_like(kept, -torch.inf)
        for row, entries in enumerate(reference(rows, visible, k).long()):
            entries = entries[entries >= 0]
            want[row, entries] = rows[row, entries].nan_to_num(nan=-torch.inf, posinf=torch.inf).clamp(min=LEAST)
        assert_same(kept, want)

    return Case(
        kernel=chosen_scores_kernel,
        arguments={
            "scores": buffer,
            "num_visible": visible,
            "kept": kept,
            "score_stride": buffer.shape[1],
            "num_columns": num_columns,
            "num_rows": num_rows,
            "k": k,
        },
        constexprs={"CHUNK": chunk, "HELD": held},
        programs=3,
        check=check,
    )


def finding(make: Callable[[int, int], torch.Tensor], num_rows: int, num_columns: int, k: int) -> Case:
    """The candidates of groups so few that a row has several blocks."""
    buffer, rows, visible = rows_and_counts(make, num_rows, num_columns, num_columns + 5)
    found = torch.full((num_rows, 32), -5, dtype=torch.int32)
    pairs = torch.full((num_rows, 16), -5, dtype=torch.int64)

    def check() -> None:
        for row, wanted in enumerate(reference(rows, visible, k)):
            wanted = wanted[wanted >= 0]
            got = pairs[row, : len(wanted)].sort(descending=True).values
            assert_same((~got).int(), wanted)

    return Case(
        kernel=candidates_kernel,
        arguments={
            "scores": buffer,
            "num_visible": visible,
            "found": found,
            "pairs": pairs,
            "score_stride": buffer.shape[1],
            "num_columns": num_columns,
            "k": k,
        },
        constexprs={"ROWS": 4, "GROUPS": 32},
        programs=num_rows,
        check=check,
    )


def ordering(num_rows: int, k: int) -> Case:
    """Random pairs in order, into rows that are wider than the choice."""
    torch.manual_seed(k)
    pairs = torch.randint(-(1 << 62), 1 << 62, (num_rows, 16))
    visible = torch.randint(0, 20, (num_rows,), dtype=torch.int32)
    chosen = torch.full((num_rows, k + 3), 77, dtype=torch.int32)

    def check() -> None:
        want = torch.full_like(chosen, 77)
        want[:, :k] = -1
        for row, count in enumerate(visible.clamp(max=k).tolist()):
            want[row, :count] = (~pairs[row, :count].sort(descending=True).values).int()
        assert_same(chosen, want)

    return Case(
        kernel=sorted_kernel,
        arguments={
            "pairs": pairs,
            "num_visible": visible,
            "chosen": chosen,
            "chosen_stride": k + 3,
            "num_columns": 20,
            "k": k,
        },
        constexprs={"WIDTH": 16},
        programs=num_rows,
        check=check,
    )


CASES: dict[str, Callable[[], Case]] = {
    "a held row": partial(choosing, random_rows, 6, 250, 64, 256, held=True),
    "special numbers in a held row": partial(choosing, special_rows, 9, 256, 100, 256, held=True),
    "equal numbers in a held row": partial(choosing, equal_rows, 9, 200, 7, 256, held=True),
    "the best of a held row": partial(choosing, random_rows, 3, 31, 1, 256, held=True),
    "all of a held row": partial(choosing, special_rows, 3, 31, 40, 256, held=True),
    "chunks": partial(choosing, random_rows, 6, 700, 64, 256, held=False),
    "special numbers in chunks": partial(choosing, special_rows, 9, 512, 100, 256, held=False),
    "equal numbers in chunks": partial(choosing, equal_rows, 9, 513, 300, 256, held=False),
    "neighbouring numbers in chunks": partial(choosing, neighbour_rows, 4, 700, 234, 256, held=False),
    "512 of 5000 in the chunks of a device": partial(choosing, random_rows, 2, 5000, 512, 4096, held=False),
    "512 of 4096 on the chip": partial(choosing, random_rows, 2, 4096, 512, 4096, held=True),
}

# Kernels that no launch on an NPU uses: they sort int64 and store element by element.
GPU_CASES: dict[str, Callable[[], Case]] = {
    "candidates": partial(finding, random_rows, 4, 300, 16),
    "candidates among special numbers": partial(finding, special_rows, 4, 300, 12),
    "candidates among equal numbers": partial(finding, equal_rows, 5, 130, 16),
    "candidates among neighbouring numbers": partial(finding, neighbour_rows, 3, 200, 3),
    "candidates of short rows": partial(finding, special_rows, 4, 30, 16),
    "sorted pairs": partial(ordering, 5, 16),
    "some sorted pairs": partial(ordering, 5, 11),
}
