"""Files to a `Dump`: names made ours, one rank beside the other, settings agreed on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsacp_npu.validation.files import Value, values_in
from dsacp_npu.validation.schema import REFUSED, SECOND, SETTINGS, TENSORS, canonical
from dsacp_ref.config import split_rule
from dsacp_ref.spec import INT32_MAX, check_choice, check_int, contract_error

__all__ = ["Dump", "Item", "read_dump"]

SETTING = {setting.name: setting for setting in SETTINGS}
TENSOR = {tensor.name: tensor for tensor in TENSORS}
RANKED = re.compile(r"rank(\d+)[/.](.+)")
FLOATS = ("float16", "bfloat16", "float32", "float64")
LARGEST = {"cp_size": 1 << 20}


@dataclass(frozen=True)
class Item:
    """A tensor of a dump, under our name.

    Args:
        array: numpy array; bfloat16 is widened to float32.
        dtype: str, of what was written.
        word: str, the name it was found under.
        place: str, the file.
    """

    array: NDArray[Any]
    dtype: str
    word: str
    place: str


@dataclass(frozen=True)
class Dump:
    """What all ranks wrote.

    Args:
        settings: by name, agreed by all files; of the command line where it says so.
        ranks: each rank's tensors by our name, those of the whole step among them.
        unknown: names that are in no schema, each with what is to be said of it.
        notes: what is right, and yet worth a word.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, dict[str, Item]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_dump(paths: Sequence[str | Path], options: Mapping[str, Any] | None = None) -> Dump:
    """The dump in these files: one a rank, or one of all ranks with names like ``rank3/seqused_kv``.

    Args:
        paths: npz, safetensors or torch files.
        options: settings that hold whatever the files say.

    Returns:
        Dump.

    Raises:
        ContractError: files that say two things, a name twice, or a value that a setting cannot have.
        OSError, ImportError: as `files.values_in`.
    """
    if not paths:
        raise contract_error("dump", "be at least one file", "none")
    told: dict[str, Any] = {}
    ranks: dict[int, dict[str, Item]] = {}
    unknown: list[str] = []
    notes: list[str] = []
    for path in map(Path, paths):
        own, shared, groups = named_values(path, unknown)
        rank = own.pop("cp_rank", None)
        for name, value in own.items():
            if name in told and told[name] != value:
                raise contract_error(name, "be the same in all files", f"{told[name]!r} and {value!r}", path.name)
            told[name] = value
        if groups and rank is not None:
            raise contract_error("cp_rank", "not be said in a file of all ranks", rank, f"{path.name} has rank0/...")
        if not groups:
            if rank is None and len(paths) > 1:
                hint = "one file a rank, each with its cp_rank; or one file with names like rank0/seqused_kv"
                raise contract_error("cp_rank", "be in every file", f"none in {path.name}", hint)
            groups = {0 if rank is None else rank: {}}
        for number, tensors in groups.items():
            if number in ranks:
                raise contract_error("cp_rank", "differ from file to file", f"{number} twice", path.name)
            twice = sorted(shared.keys() & tensors.keys())
            if twice:
                raise contract_error(twice[0], "be written once", f"for all ranks and for rank {number}", path.name)
            ranks[number] = shared | tensors
    settings = told | dict(options or {})
    notes += [
        f"{name}: {settings[name]} of the command line; the files say {told[name]}"
        for name in told
        if settings[name] != told[name]
    ]
    settings = checked_settings(settings, sorted(ranks))
    ranks = {rank: converted(ranks[rank], settings, notes) for rank in sorted(ranks)}
    return Dump(settings, ranks, tuple(dict.fromkeys(unknown)), tuple(dict.fromkeys(notes)))


Named = tuple[dict[str, Any], dict[str, Item], dict[int, dict[str, Item]]]


def named_values(path: Path, unknown: list[str]) -> Named:
    """A file's settings, the tensors that it has for all its ranks, and each rank's own."""
    ours = canonical()
    settings: dict[str, Any] = {}
    shared: dict[str, Item] = {}
    groups: dict[int, dict[str, Item]] = {}
    for full, value in values_in(path).items():
        match = RANKED.fullmatch(full)
        word = match[2] if match else full
        if word not in ours:
            reason = f" ({REFUSED[word]})" if word in REFUSED else ""
            unknown.append(f"{word}{reason}")
            continue
        name = ours[word]
        if name in SETTING:
            number = setting_value(name, word, value)
            if match:
                raise contract_error(full, "be said once for all ranks", number, f"write {word}")
            if name in settings:
                raise contract_error(name, "be written under one name", f"two in {path.name}", f"one is {word}")
            settings[name] = number
            continue
        if isinstance(value, str):
            raise contract_error(name, "be an array", f"the word {value!r}", path.name)
        where = groups.setdefault(int(match[1]), {}) if match else shared
        # The second of two tensors that are one of ours stands under its own name until they are put together.
        key = word if word in SECOND else name
        if key in where:
            got = f"{where[key].word} and {word} in {path.name}"
            raise contract_error(name, "be written under one name", got, "they are two spellings of it")
        where[key] = Item(value.array, value.dtype, word, path.name)
    return settings, shared, groups


def setting_value(name: str, word: str, value: Value | str) -> Any:
    """A setting as the type that it has; a file may have written a number as a word."""
    kind = SETTING[name].kind
    raw: Any = value
    if isinstance(value, Value):
        if value.array.size != 1:
            raise contract_error(word, "be one number", f"shape {list(value.array.shape)}")
        raw = value.array.item()
    try:
        if kind is bool and isinstance(raw, str):
            raw = {"true": True, "false": False}[raw.lower()]
        if kind is int and not isinstance(raw, str) and raw != int(raw):
            raise ValueError
        if kind is bool and raw not in (True, False):
            raise ValueError
        number = kind(raw)
    except (KeyError, ValueError, TypeError):
        raise contract_error(word, f"be a value of type {kind.__name__}", repr(raw)) from None
    return number + 1 if word == "ori_win_left" else number


def checked_settings(settings: dict[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """The settings with what is left out filled in, once each is found to be possible."""
    settings = {"causal": True, "empty_extent": "zero", **settings}
    check_choice("empty_extent", settings["empty_extent"], ("zero", "prefix"))
    if not settings["causal"] and settings["empty_extent"] == "prefix":
        raise contract_error(
            "empty_extent", "be 'zero' when causal is false", "'prefix'", "a draft's empty row reads 0"
        )
    if "compress_ratio" in settings:
        settings["compress_ratio"] = settings["compress_ratio"] or 1  # checkpoints write 0 for window only
    for name, value in settings.items():
        if SETTING[name].kind is int:
            check_int(
                name, value, 1 if name not in ("num_input_tokens", "cp_rank") else 0, LARGEST.get(name, INT32_MAX)
            )
        if SETTING[name].kind is float and not 0 < value < np.inf:
            raise contract_error(name, "be a finite number > 0", value)
    if "rows" in settings:
        check_choice("rows", settings["rows"], ("full", "scattered"))
    if "dtype" in settings:
        check_choice("dtype", settings["dtype"], FLOATS)
    if "split" in settings:
        settings["split"] = str(split_rule(settings["split"]))
    if "cp_size" in settings and ranks and ranks[-1] >= settings["cp_size"]:
        hint = "ranks count from 0"
        raise contract_error("cp_rank", f"be below cp_size {settings['cp_size']}", ranks[-1], hint)
    return settings


# --- one rank's tensors ---


def converted(tensors: dict[str, Item], settings: Mapping[str, Any], notes: list[str]) -> dict[str, Item]:
    """The tensors as the schema means them: spellings turned into ours, dtypes and numbers of axes checked."""
    found: dict[str, Item] = {}
    seconds: dict[str, NDArray[Any]] = {}
    wide: list[str] = []
    for key, item in tensors.items():
        if key in SECOND:
            first = next((name for name, other in tensors.items() if other.word == SECOND[key]), None)
            if first is None:
                raise contract_error(key, f"stand beside {SECOND[key]}", "it alone", item.place)
            seconds[key] = typed(first, item, wide).array
            continue
        found[key] = typed(key, item, wide)
    for key, item in sorted(found.items(), key=lambda pair: pair[1].word in NEED_OTHERS):
        if item.word in CONVERTED:
            check_axes(key, item)
            others = seconds | {name: other.array for name, other in found.items()}
            found[key] = replace(item, array=CONVERTED[item.word](item, others))
            notes.append(f"{key}: read from {item.word} by its rule")
        if key == "slot_mapping" and item.array.ndim == 2 and item.array.shape[1] == 2:
            found[key] = replace(item, array=flat_slots(item, settings))
            notes.append("slot_mapping: pairs of block and place read as slots")
    for key, item in found.items():
        check_axes(key, item)
    if wide:
        notes.append(f"int64 is read as int32, but operators take int32 only: {', '.join(wide)}")
    return found


def typed(name: str, item: Item, wide: list[str]) -> Item:
    """The tensor without the unit axis that engines give it, in a dtype that checks read."""
    due, array = TENSOR[name], item.array
    axis = due.unit_axis
    while axis is not None and array.ndim > len(due.axes) and array.shape[axis] == 1:
        array = array.squeeze(axis)
    if due.kind == "float":
        if item.dtype not in FLOATS:
            raise contract_error(name, f"have dtype {', '.join(FLOATS)}", item.dtype, f"{item.word} in {item.place}")
        return replace(item, array=array)
    if due.kind == "int8":
        if item.dtype != "int8":
            raise contract_error(name, "have dtype int8", item.dtype, f"{item.word} in {item.place}")
        return replace(item, array=array)
    if item.dtype not in ("int32", "int64"):
        raise contract_error(name, "have dtype int32", item.dtype, f"{item.word} in {item.place}: operators take int32")
    if item.dtype == "int64":
        if array.size and (array.max() > INT32_MAX or array.min() < -INT32_MAX - 1):
            raise contract_error(name, "fit into int32", int(np.abs(array).max()), f"{item.word} in {item.place}")
        wide.append(name)
    return replace(item, array=array.astype(np.int32))


def check_axes(name: str, item: Item) -> None:
    """Refuse a tensor of another number of axes."""
    due = TENSOR[name]
    if item.array.ndim != len(due.axes):
        shape = list(item.array.shape)
        raise contract_error(name, f"have shape [{', '.join(due.axes)}]", shape, f"{item.word} in {item.place}")


def flat_slots(item: Item, settings: Mapping[str, Any]) -> NDArray[np.int32]:
    """Slots from pairs of block and place in the block."""
    if "block_size" not in settings:
        raise contract_error("block_size", "be known where slot_mapping is pairs", "none", "write it, or --block-size")
    blocks, places = item.array.T
    return np.where(blocks < 0, -1, blocks * np.int32(settings["block_size"]) + places).astype(np.int32)


def offsets(lengths: NDArray[Any]) -> NDArray[np.int32]:
    """A leading 0 and the sums."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


Others = Mapping[str, NDArray[Any]]


def with_leading_zero(item: Item, others: Others) -> NDArray[np.int32]:
    """Offsets of an operator that may leave the leading 0 out: there, if there is one more of them than extents."""
    extents = others.get("seqused_kv")
    if extents is not None and extents.shape == (len(item.array) - 1,):
        return item.array
    return np.concatenate([[0], item.array]).astype(np.int32)


def in_turn(item: Item, others: Others) -> NDArray[np.int32]:
    """The first and second block of every request."""
    second = next(word for word, first in SECOND.items() if first == item.word)
    if second not in others:
        raise contract_error(item.word, f"stand beside {second}", "it alone", item.place)
    if others[second].shape != item.array.shape:
        raise contract_error(second, f"have shape {list(item.array.shape)}", list(others[second].shape), item.place)
    return np.stack([item.array, others[second]], axis=-1).reshape(-1).astype(np.int32)


# Spellings that are read with the help of another tensor, which may be converted itself.
NEED_OTHERS = ("actual_seq_lengths_query", "out_cache_loc")


def with_pads_of_zero(item: Item, others: Others) -> NDArray[np.int32]:
    """Slots of an engine whose slot 0 is nobody's: behind the last token it is -1."""
    loc = others.get("query_start_loc")
    if loc is None or loc.ndim != 1 or len(loc) == 0:
        return item.array
    array = item.array.copy()
    pads = array[int(loc[-1]) :]
    pads[pads == 0] = -1
    return array


CONVERTED = {
    "extend_seq_lens": lambda item, others: offsets(item.array),
    "kv_cu_seq_lens": lambda item, others: np.diff(item.array).astype(np.int32),
    "actual_seq_lengths_query": with_leading_zero,
    "actual_seq_q_prev_tensor": lambda item, others: offsets(in_turn(item, others)),
    "kv_len_prev_tensor": in_turn,
    "out_cache_loc": with_pads_of_zero,
}
