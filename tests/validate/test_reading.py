"""Names, spellings, files and settings: what is read as what, and what is refused in which words."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsacp_npu.record import write_dump
from dsacp_npu.validation.reading import CONVERTED, Dump, read_dump
from dsacp_npu.validation.report import examined
from dsacp_npu.validation.schema import REFUSED, SECOND, SETTINGS, TENSORS, canonical
from dsacp_ref.spec import ContractError
from tests.validate.test_length_faults import ints

LENGTHS = {"query_start_loc": ints(0, 5, 8), "seq_lens": ints(9, 3)}


def read(folder: Path, *, options: Any = None, **tensors: Any) -> Dump:
    """A dump of one file."""
    write_dump(folder / "dump.npz", tensors)
    return read_dump([folder / "dump.npz"], options)


def array(dump: Dump, name: str, rank: int = 0) -> list[Any]:
    """A tensor of the dump."""
    return dump.ranks[rank][name].array.tolist()


# --- spellings ---


def test_no_word_means_two_things() -> None:
    words = [each.name for each in (*SETTINGS, *TENSORS)]
    words += [spelling.word for each in (*SETTINGS, *TENSORS) for spelling in each.spellings] + list(SECOND)
    assert len(words) == len(set(words))
    assert not set(words) & set(REFUSED)
    assert set(canonical()) == set(words)


def test_every_rule_has_its_function() -> None:
    ruled = {s.word for each in TENSORS for s in each.spellings if s.rule}
    assert ruled == set(CONVERTED)


@pytest.mark.parametrize(
    ("tensors", "name", "due"),
    [
        ({"extend_seq_lens": ints(5, 3)}, "query_start_loc", [0, 5, 8]),
        ({"q_cu_seq_lens": ints(0, 5, 8)}, "query_start_loc", [0, 5, 8]),
        ({"kv_cu_seq_lens": ints(0, 9, 12)}, "seq_lens", [9, 3]),
        ({"local_query_start_loc": ints(0, 4, 4)}, "cu_seqlens_q", [0, 4, 4]),
        ({"actual_seq_lengths_query": ints(4, 4)}, "cu_seqlens_q", [0, 4, 4]),
        ({"actual_seq_lengths_query": ints(0, 4), "actual_seq_lengths_key": ints(0, 8)}, "cu_seqlens_q", [0, 0, 4]),
        ({"actual_seq_lengths_query": ints(0, 4), "seqused_k": ints(8)}, "cu_seqlens_q", [0, 4]),
        ({"kv_len_prev_tensor": ints(1, 3), "kv_len_next_tensor": ints(2, 4)}, "seqused_kv", [1, 2, 3, 4]),
        (
            {"actual_seq_q_prev_tensor": ints(1, 3), "actual_seq_q_next_tensor": ints(2, 4)},
            "cu_seqlens_q",
            [0, 1, 3, 6, 10],
        ),
        ({"new_cache_slots": ints(4, -1)}, "slot_mapping", [4, -1]),
        ({"out_cache_loc": ints(0, 7, 0), "extend_seq_lens": ints(2)}, "slot_mapping", [0, 7, -1]),
        ({"slot_mapping": np.array([[2, 1], [-1, -1]], np.int32), "block_size": 4}, "slot_mapping", [9, -1]),
        ({"start_pos": ints(4, 0)}, "num_computed_tokens", [4, 0]),
        ({"cmp_sparse_indices": np.array([[[3, -1]]], np.int32)}, "topk_indices", [[3, -1]]),
        ({"ori_kv": np.zeros((2, 3, 1, 1))}, "swa_cache", [[[0.0]] * 3] * 2),
    ],
)
def test_spellings(tmp_path: Path, tensors: dict[str, Any], name: str, due: list[Any]) -> None:
    assert array(read(tmp_path, **tensors), name) == due


def test_settings_of_other_names(tmp_path: Path) -> None:
    dump = read(tmp_path, ori_win_left=127, cmp_ratio=0, prefill_cp_mode="in-seq-split", page_size=64, pcp_size=2)
    told = {name: dump.settings[name] for name in ("window_size", "compress_ratio", "split", "block_size", "cp_size")}
    assert told == {"window_size": 128, "compress_ratio": 1, "split": "zigzag", "block_size": 64, "cp_size": 2}


@pytest.mark.parametrize("word", REFUSED)
def test_words_of_two_meanings_are_listed_with_the_reason(tmp_path: Path, word: str) -> None:
    dump = read(tmp_path, **{word: ints(1, 2)}, mine=ints(3))
    assert dump.unknown == (f"{word} ({REFUSED[word]})", "mine")


def test_the_command_line_holds_against_the_files(tmp_path: Path) -> None:
    dump = read(tmp_path, split="contiguous", cp_size=2, options={"split": "zigzag"})
    assert dump.settings["split"] == "zigzag"
    assert dump.notes == ("split: zigzag of the command line; the files say contiguous",)


def test_int64_is_read_and_noted(tmp_path: Path) -> None:
    dump = read(tmp_path, seq_lens=np.array([9, 3]))
    assert dump.ranks[0]["seq_lens"].array.dtype == np.int32
    assert dump.notes == ("int64 is read as int32, but operators take int32 only: seq_lens",)


def test_one_file_of_all_ranks_shares_what_belongs_to_the_step(tmp_path: Path) -> None:
    dump = read(tmp_path, **LENGTHS, **{"rank0/seqused_kv": ints(1), "rank3.seqused_kv": ints(2)})
    assert sorted(dump.ranks) == [0, 3]
    assert array(dump, "seq_lens", 3) == [9, 3]
    assert array(dump, "seqused_kv", 3) == [2]


def test_bfloat16_is_read_without_torch_or_ml_dtypes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    q = torch.tensor([[[1.0, -2.5, 3e38]]]).bfloat16()
    save_file({"q": q}, tmp_path / "rank0.safetensors")
    item = read_dump([tmp_path / "rank0.safetensors"]).ranks[0]["q"]
    assert (item.dtype, item.array.dtype) == ("bfloat16", np.float32)
    assert np.array_equal(item.array, q.float().numpy())
    torch.save({"q": q, "cp_size": 2, "split": "zigzag", "causal": True}, tmp_path / "rank0.pt")
    dump = read_dump([tmp_path / "rank0.pt"])
    assert dump.ranks[0]["q"].dtype == "bfloat16"
    assert (dump.settings["cp_size"], dump.settings["split"], dump.settings["causal"]) == (2, "zigzag", True)


def test_pad_rows_may_be_left_out(tmp_path: Path) -> None:
    """7 tokens on 2 ranks: the second has 3 and a pad row."""
    batch = {"query_start_loc": ints(0, 7), "seq_lens": ints(7), "cp_size": 2, "split": "contiguous", "cp_rank": 1}
    for places in (ints(4, 5, 6), ints(4, 5, 6, -1), ints(4, 5, 6, 0)):
        assert not examined(read(tmp_path, **batch, positions=places)).findings


# --- refusals ---


def files(folder: Path, *each: dict[str, Any]) -> list[Path]:
    """A file of each."""
    paths = [folder / f"{i}.npz" for i in range(len(each))]
    for path, tensors in zip(paths, each, strict=True):
        write_dump(path, tensors)
    return paths


REFUSALS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "two spellings": (
        [{"seqused_kv": ints(1), "local_seq_lens": ints(1)}],
        "seqused_kv must be written under one name, got seqused_kv and local_seq_lens in 0.npz",
    ),
    "two settings": ([{"cp_size": 2, "pcp_size": 2}], "cp_size must be written under one name"),
    "files disagree": ([{"cp_size": 2, "cp_rank": 0}, {"cp_size": 4, "cp_rank": 1}], "cp_size must be the same in all"),
    "no rank": ([{"cp_rank": 0}, {}], "cp_rank must be in every file, got none in 1.npz"),
    "a rank twice": ([{"cp_rank": 1}, {"cp_rank": 1}], "cp_rank must differ from file to file, got 1 twice"),
    "rank in a file of all": (
        [{"cp_rank": 1, "rank0/q": np.zeros((1, 1, 1))}],
        "cp_rank must not be said in a file of",
    ),
    "shared and own": (
        [{"seq_lens": ints(1), "rank0/seq_lens": ints(1)}],
        "seq_lens must be written once, got for all ranks and for rank 0",
    ),
    "own setting": ([{"rank0/cp_size": 2}], "rank0/cp_size must be said once for all ranks"),
    "rank beyond": ([{"cp_rank": 2, "cp_size": 2}], "cp_rank must be below cp_size 2, got 2; ranks count from 0"),
    "dtype": ([{"seq_lens": np.zeros(2)}], "seq_lens must have dtype int32, got float64"),
    "float dtype": ([{"q": np.zeros((1, 1, 1), np.int32)}], "q must have dtype float16, bfloat16, float32, float64"),
    "int8": ([{"index_cache.values": np.zeros((1, 1, 1))}], "index_cache.values must have dtype int8, got float64"),
    "too large": ([{"seq_lens": np.array([2**40])}], "seq_lens must fit into int32, got 1099511627776"),
    "axes": ([{"seq_lens": np.zeros((2, 2), np.int32)}], "seq_lens must have shape [num_reqs], got [2, 2]"),
    "axes, by rule": ([{"kv_cu_seq_lens": np.zeros((2, 2), np.int32)}], "seq_lens must have shape [num_reqs], got"),
    "a word": ([{"seq_lens": "long"}], "seq_lens must be an array, got the word 'long'"),
    "objects": ([{"seq_lens": np.array([b"x"])}], "seq_lens must be numbers, or one word, got dtype |S1"),
    "setting shape": ([{"cp_size": ints(1, 2)}], "cp_size must be one number, got shape [2]"),
    "setting type": ([{"cp_size": "two"}], "cp_size must be a value of type int, got 'two'"),
    "fraction": ([{"cp_size": 2.5}], "cp_size must be a value of type int, got 2.5"),
    "size": ([{"cp_size": 0}], "cp_size must be an int in [1, 1048576], got 0"),
    "split": ([{"split": "zigzig"}], "split must be one of"),
    "scale": ([{"softmax_scale": -1.0}], "softmax_scale must be a finite number > 0, got -1.0"),
    "empty_extent": ([{"empty_extent": "none"}], "empty_extent must be one of 'zero', 'prefix', got 'none'"),
    "draft": ([{"empty_extent": "prefix", "causal": False}], "empty_extent must be 'zero' when causal is false"),
    "pairs": ([{"slot_mapping": np.zeros((2, 2), np.int32)}], "block_size must be known where slot_mapping is pairs"),
    "half": (
        [{"kv_len_next_tensor": ints(1)}],
        "kv_len_next_tensor must stand beside kv_len_prev_tensor, got it alone",
    ),
    "other half": (
        [{"kv_len_prev_tensor": ints(1)}],
        "kv_len_prev_tensor must stand beside kv_len_next_tensor, got it",
    ),
    "half of floats": (
        [{"kv_len_prev_tensor": ints(1), "kv_len_next_tensor": np.ones(1)}],
        "seqused_kv must have dtype int32, got float64; kv_len_next_tensor in 0.npz",
    ),
    "no axis": (
        [{"actual_seq_lengths_query": ints(1), "seqused_kv": np.int32(3)}],
        "seqused_kv must have shape [rows]",
    ),
    "no axis beside slots": (
        [{"out_cache_loc": ints(1), "query_start_loc": np.int32(3)}],
        "query_start_loc must have shape [num_reqs + 1], got []",
    ),
    "halves": (
        [{"kv_len_prev_tensor": ints(1), "kv_len_next_tensor": ints(1, 2)}],
        "kv_len_next_tensor must have shape [1], got [2]",
    ),
}


@pytest.mark.parametrize(("tensors", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(tmp_path: Path, tensors: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ContractError) as refused:
        read_dump(files(tmp_path, *tensors))
    assert words in str(refused.value)


def test_a_step_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    dump = read(tmp_path, **LENGTHS, cp_size=2, split="zigzag", num_input_tokens=9)
    with pytest.raises(ContractError, match="num_input_tokens must equal the 8 tokens"):
        examined(dump)


def written_bytes(data: bytes) -> Callable[[Path], object]:
    """Writes them to a path."""
    return lambda path: path.write_bytes(data)


def pickled(path: Path) -> None:
    """An npz file of objects."""
    buffer = io.BytesIO()
    np.savez(buffer, x=np.array([{}], dtype=object))
    path.write_bytes(buffer.getvalue())


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("a.txt", written_bytes(b"x"), "dump must end in .npz, .safetensors, .pt, .pth, got a.txt"),
        ("a.npz", written_bytes(b"not a zip"), "dump must be an npz file"),
        ("a.npz", written_bytes(b""), "dump must be an npz file"),
        ("a.npz", pickled, "dump must be an npz file of plain arrays"),
        ("a.safetensors", written_bytes(b"x" * 20), "dump must be a safetensors file, got a.safetensors"),
        ("a.pt", written_bytes(b"x"), "dump must be a torch file of plain tensors"),
        ("a.pt", lambda path: torch.save([1], path), "dump must hold a dict by name, got list"),
        ("a.pt", lambda path: torch.save({"x": [1]}, path), "x must be a tensor, a number or a word, got list"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, write: Callable[[Path], object], words: str) -> None:
    write(tmp_path / name)
    with pytest.raises(ContractError) as refused:
        read_dump([tmp_path / name])
    assert words in str(refused.value)


def test_a_dump_is_written_as_one_of_two_kinds(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"path must end in .npz or .safetensors, got x.pt"):
        write_dump(tmp_path / "x.pt", {})
    with pytest.raises(ContractError, match="dump must be at least one file"):
        read_dump([])
