"""Right dumps have no finding: every split, ratio, way to exchange, dtype and kind of file."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsacp_npu import record
from dsacp_npu.validation.reading import read_dump
from dsacp_npu.validation.report import Report, examined
from tests.layer_strategies import CSA, HCA, SMALL, WINDOW, Cut, Kind, config_for, legal_cut
from tests.maths_strategies import seeds
from tests.strategies import fewer
from tests.validate.dumps import recorded, report_of, written

CUTS = (
    Cut(2),
    Cut(3, "zigzag", "scattered", "gather_kv", "replicated_weight"),
    Cut(4, "round_robin", "full", "gather_kv", "gather_weight", 7),
    Cut(2, "zigzag_padded", "scattered", "gather_hidden"),
    Cut(2, "contiguous", "full", "gather_compressed", "all_to_all", 3),
    Cut(4, "round_robin_page(3)", "full", "gather_kv", "gather_weight"),
    Cut(8, "contiguous_request", "scattered", "gather_kv", "gather_weight"),
    Cut(2, "zigzag_ceil"),
    Cut(1),
)


def assert_right(report: Report) -> None:
    """Nothing differs, and something was compared on every rank."""
    assert not report.findings, report.findings[0]
    assert {result.rank for result in report.results if result.status == "right"} == {r.rank for r in report.results}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WINDOW, CSA, HCA], ids=lambda kind: f"ratio {kind.ratio}")
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.split} {cut.key_mode} {cut.output_mode}")
def test_every_way_to_cut(tmp_path: Path, kind: Kind, cut: Cut) -> None:
    for idle in ((), (3, 1)):
        report = report_of(tmp_path, recorded(kind=kind, cut=cut, idle=idle))
        assert_right(report)
        assert not report.unknown
        skipped = {result.check for result in report.results if result.status == "skipped"}
        assert skipped <= {"full_rope", "slots"}, skipped


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("together", [False, True], ids=["a file a rank", "one file"])
def test_every_kind_of_file(tmp_path: Path, suffix: str, together: bool) -> None:
    dumps: Any = recorded(cut=CUTS[1])
    if together:
        dumps = [record.all_ranks(dumps)]
    report = examined(read_dump(written(tmp_path, dumps, suffix)))
    assert_right(report)
    assert len({result.rank for result in report.results}) == 3


@pytest.mark.parametrize("kind", [WINDOW, CSA, HCA], ids=lambda kind: f"ratio {kind.ratio}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_short_floats(tmp_path: Path, dtype: str, kind: Kind) -> None:
    """The torch layer below float64 stays within the budget of the plain computation."""
    for seed, cut in enumerate(CUTS[:2]):
        assert_right(report_of(tmp_path, recorded(kind=kind, cut=cut, dtype=dtype, seed=seed), ".safetensors"))


@st.composite
def stories(draw: st.DrawFn) -> dict[str, Any]:
    """Requests, prefixes, padded slots and a way to cut them: fewer tokens than ranks, and none at all."""
    kind = draw(st.sampled_from([WINDOW, CSA, HCA]))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    computed = [draw(st.integers(0, length)) for length in lengths]
    rng = np.random.default_rng(draw(seeds))
    cut = legal_cut(rng, kind.ratio)
    config = config_for(rng, SMALL, cut)
    idle = draw(st.lists(st.integers(1, 3), max_size=2))
    return {"kind": kind, "lengths": lengths, "computed": computed, "cut": cut, "config": config} | {
        "idle": idle,
        "seed": draw(seeds),
    }


@pytest.mark.slow
@fewer(3)
@given(stories())
def test_never_a_false_alarm(story: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        assert_right(report_of(Path(folder), recorded(**story)))
