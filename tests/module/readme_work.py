"""README's twelve lines, in a worker process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dsacp_npu.distributed import Ranks


def twelve_lines(ranks: Ranks, code: str, given: dict[str, Any]) -> np.ndarray:
    """The stream after the lines, with what README says the engine has."""
    names = {**given, "world_size": ranks.cp_size, "rank": ranks.cp_rank, "x": torch.tensor(given["x"])}
    names |= {"norm": lambda x: x / (1 + x.abs()), "experts": lambda x: x + x.sin()}
    exec(compile(code, "README.md", "exec"), names)
    names["tp"].close()
    rows: np.ndarray = names["x"].numpy()
    return rows
