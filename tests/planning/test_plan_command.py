"""`plan` as one calls it: what it prints, draws and answers to a program, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsacp_npu.__main__ import main
from dsacp_npu.commands.parity_trace import full_steps, requests_of
from dsacp_npu.commands.plan import batches_of
from dsacp_npu.planning.chips import chip_of

TRACE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation.csv"
KEPT = Path(__file__).parents[2] / "docs" / "mooncake_plan.json"
SMALL_TRACE = """\
arrival_ms,input_tokens,cached_prefix_tokens,output_tokens
0,40,0,5
10,3000,512,7
20,90000,0,9
30,17,0,1
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0]}
{"timestamp": 10, "input_length": 3000, "output_length": 7, "hash_ids": [1, 2, 3, 4, 5, 6]}
"""


def answer(capsys: pytest.CaptureFixture[str], line: str) -> Any:
    """What a program gets."""
    assert main(["plan", *line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What a reader gets."""
    assert main(["plan", *line.split()]) == 0
    return capsys.readouterr().out


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of four prompts."""
    path = tmp_path / "trace.csv"
    path.write_text(SMALL_TRACE)
    return path


# --- a batch ---


def test_the_answer_holds_every_scheme_with_its_costs(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys, "--query-lens 8k 100 --computed 0 64k --ranks 4 --model v4-flash --chip h200 --precision w8a8"
    )
    assert found["schema"] == 1
    assert found["call"] == {
        "model": "v4-flash",
        "chip": "h200",
        "ranks": 4,
        "precision": "w8a8",
        "query_lens": [8192, 100],
        "computed": [0, 65536],
    }
    assert found["chip"]["memory"] == [141, "GB; data sheet"]
    schemes = found["schemes"]
    assert [scheme["fits"] for scheme in schemes] == sorted((scheme["fits"] for scheme in schemes), reverse=True)
    assert {scheme["topology"] for scheme in schemes} == {"tp4", "cp4", "cp2 x tp2"}
    for scheme in schemes:
        assert sum(scheme["seconds_by_part"].values()) == pytest.approx(scheme["seconds"])
        assert sum(layer["num_layers"] * layer["seconds"] for layer in scheme["layers"]) == pytest.approx(
            scheme["seconds"]
        )
        assert sum(layer["num_layers"] * layer["received"] for layer in scheme["layers"]) == scheme["received"]
        assert scheme["memory"]["total"] == sum(scheme["memory"][part] for part in scheme["memory"] if part != "total")
        assert scheme["imbalance"] >= 1
    assert all("round_robin" in refused["split"] and refused["reason"] for refused in found["refused"])
    assert 1 < found["pays_from"] < 8192
    assert set(found["break_even"]) == {"heads_alone", "num_bytes", "seconds"}


def test_the_tables_say_what_the_answer_holds(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--query-lens 8k"
    found, table = answer(capsys, line), printed(capsys, line)
    text = " ".join(table.split())
    best, tp = found["schemes"][0], next(each for each in found["schemes"] if each["cp_size"] == 1)
    assert "v4-flash on 8 x 910c, w4a8: 1 request, 8,192 new tokens, 0 cached" in text
    assert f"{best['seconds']:.3f}" in text
    assert f"{tp['seconds'] / best['seconds']:.2f}" in text
    assert f"{best['bound']}." in text
    assert f"from {found['pays_from']:,} tokens" in text
    assert f"{found['break_even']['num_bytes']:,}, of the heads" in text
    assert "plain TP" in text and "vllm-ascend DSA-CP" in text and "SGLang in-seq-split" in text  # noqa: PT018
    assert "18 are refused; --all lists them" in text
    assert max(map(len, table.splitlines())) <= 120
    assert printed(capsys, line + " --all").count("Refused: ") == 18


def test_one_rank_and_v32_have_fewer_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {name: [getattr(chip_of("h200"), name), source] for name, source in chip_of("h200").sources}
    (tmp_path / "large.json").write_text(json.dumps(large | {"memory": [1000, "a wish"]}))
    alone = answer(capsys, f"--query-lens 100 --ranks 1 --chip {tmp_path}/large.json")
    assert [scheme["topology"] for scheme in alone["schemes"]] == ["tp1"]
    assert alone["pays_from"] is None
    assert alone["break_even"] is None
    latent = answer(capsys, "--query-lens 8k --model v3.2 --ranks 8 --chip h200")
    assert (alone["call"]["precision"], latent["call"]["precision"]) == ("w4a8", "w8a8")  # as they are released
    assert {scheme["key_mode"] for scheme in latent["schemes"] if scheme["cp_size"] > 1} == {"gather_kv"}
    assert "SGLang round-robin-split" in printed(capsys, "--query-lens 8k --model v3.2 --ranks 8 --chip h200")


def test_ranks_that_no_head_divides_still_split_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--query-lens 8k --ranks 7 --chip h200")
    assert found["pays_from"] is None  # there is no plain TP to beat
    assert {scheme["topology"] for scheme in found["schemes"]} == {"cp7"}
    assert any("tp_size must divide heads 64" in refused["reason"] for refused in found["refused"])
    assert "x TP" in printed(capsys, "--query-lens 8k --ranks 7 --chip h200")


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, line in {"plan.png": "--query-lens 32k", "replay.svg": f"--trace {trace}"}.items():
        printed(capsys, f"{line} --plot {tmp_path / name}")
        assert (tmp_path / name).stat().st_size > 10_000


def test_planning_needs_no_torch() -> None:
    code = "import sys; from dsacp_npu.__main__ import main; main(['plan', '--query-lens', '9', '--json'])"
    code += "; sys.exit(' '.join({'torch', 'rich', 'matplotlib', 'transformers'} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# --- a trace ---


@pytest.mark.slow
@pytest.mark.parametrize("text", [SMALL_TRACE, MOONCAKE], ids=["csv", "mooncake"])
def test_a_trace_is_planned_step_by_step(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    for option in ("--step-tokens 16k", "--step-tokens 2k --alone"):
        found = answer(capsys, f"--trace {path} {option}")
        assert found["steps"] == sum(scheme["chosen"] for scheme in found["schemes"])
        assert found["tokens"] == sum(request.prompt - request.cached for request in requests_of(str(path)))
        assert found["seconds_chosen"] <= min(scheme["seconds"] for scheme in found["schemes"])
        table = printed(capsys, f"--trace {path} {option}")
        assert "the best for each step" in table
        assert f"{found['seconds_chosen']:.1f}" in table


def test_steps_hold_every_token_once(trace: Path) -> None:
    """In order, full but for the last; or each prompt in steps of its own."""
    steps = batches_of(str(trace), 16384, alone=False)
    assert [batch.num_tokens for batch in steps[:-1]] == [16384] * 5
    assert steps[0].query_lens[:2] == (40, 2488)
    assert steps[0].computed[:2] == (0, 512)
    alone = batches_of(str(trace), 16384, alone=True)
    assert [batch.query_lens for batch in alone] == [(40,), (2488,), *[(16384,)] * 5, (8080,), (17,)]
    assert [batch.computed for batch in alone][2:5] == [(0,), (16384,), (32768,)]
    assert len(steps) == len(full_steps(requests_of(str(trace)), 16384))


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE.name} does not lie beside the checkout")
@pytest.mark.skipif(not KEPT.exists(), reason="docs/ is missing: the tests run beside an installed wheel")
def test_the_real_trace_gives_what_the_pages_show(capsys: pytest.CaptureFixture[str]) -> None:
    """In full steps; a few minutes on a busy machine, so its prompts alone are left to who makes the page."""
    found, kept = answer(capsys, f"--trace {TRACE}"), json.loads(KEPT.read_text())["full steps"]
    assert (found["steps"], found["tokens"]) == (kept["steps"], kept["tokens"])
    assert [scheme["seconds"] for scheme in found["schemes"]] == pytest.approx(
        [scheme["seconds"] for scheme in kept["schemes"]]
    )
    assert [scheme_of(scheme) for scheme in found["schemes"]] == [scheme_of(scheme) for scheme in kept["schemes"]]


def scheme_of(words: dict[str, Any]) -> list[Any]:
    """What a scheme's words say of the scheme alone."""
    return [words[name] for name in words if name not in ("seconds", "chosen")]


@pytest.mark.skipif(not KEPT.exists(), reason="docs/ is missing: the tests run beside an installed wheel")
def test_the_page_tells_what_was_kept() -> None:
    """Every scheme's row in docs/planning.md, from the answers beside it."""
    full, alone = json.loads(KEPT.read_text()).values()
    text = KEPT.with_name("planning.md").read_text()
    for replay in (full, alone):
        for scheme in replay["schemes"]:
            assert f"| {scheme['seconds']:.0f} | {scheme['seconds'] / replay['seconds_chosen']:.3f} |" in text
    assert f"| the best for each step | {full['seconds_chosen']:.0f} | 1.000 | {alone['seconds_chosen']:.0f} |" in text
    assert f"{full['steps']:,} full steps" in text


# --- what is refused ---


@pytest.mark.parametrize(
    "line, text",
    [
        ("", "the batch must be --query-lens or --trace, got neither; try --query-lens 128k"),
        ("--query-lens 5 --trace x.csv", "the batch must be --query-lens or --trace, got both"),
        ("--trace x.csv --computed 4", "--computed must stand with --query-lens, got --trace"),
        ("--query-lens 5 --alone", "--alone must stand with --trace, got --query-lens"),
        ("--query-lens 5 --step-tokens 8", "--step-tokens must stand with --trace, got --query-lens"),
        ("--query-lens 5 --computed 1 2", "computed must have 1 entries, got 2; one per request"),
        ("--query-lens 0", "query_lens must be an int in [1, 2147483647], got 0"),
        ("--query-lens 5 --ranks 0", "--ranks must be an int in [1, 4096], got 0"),
        ("--query-lens 5 --model v5", "--model must be v4-flash, v4-pro, v3.2, or a config.json, got 'v5'"),
        ("--query-lens 5 --chip tpu", "--chip must be 910b3, 910c, 950pr, h200, or a JSON file, got 'tpu'"),
        ("--query-lens 5 --plot x.gif", "--plot must end in .png, .svg or .pdf, got 'x.gif'"),
        ("--trace nothing.csv", "nothing.csv"),
        ("--query-lens 2000m --computed 100m", "must be"),
        ("--query-lens 1m --model v4-pro --ranks 8", "no scheme fits into 64 GB of 910c; the least needs"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *line.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("dsacp_npu plan: error: ")
    assert text in output.err


@pytest.mark.parametrize("word", ["12e3", "128kb", "-5", "1.5k", ""])
def test_a_number_of_tokens_is_a_number_of_tokens(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"--query-lens={word}"])
    assert ended.value.code == 2
    assert f"invalid number of tokens: {word!r}; write 131072, or 128k" in capsys.readouterr().err
