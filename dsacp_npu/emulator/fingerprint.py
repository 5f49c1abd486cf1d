"""The 1024 words of a metadata tensor: here they say what it was built for, so that another call is found out.

On the device they are a split of the work over cores. It fits one set of lengths; with others, rows stay uncomputed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from dsacp_npu._tensors import torch
from dsacp_npu.emulator.checks import check_tensor
from dsacp_npu.emulator.errors import StaleMetadataError

__all__ = ["check_metadata", "metadata_fake", "metadata_tensor"]

WORDS = 1024
MAGIC = 0x05AC9
FIELDS = 32  # words for the operator and its fields; the lengths follow
LENGTHS = 400  # words kept of one list of lengths; beyond them only the checksum tells
NAMES = ("TND", "BSND", "PA_ND", "PA_BSND")
HINT = "build it anew for every step; on the device rows stay uncomputed, without a word"


def number(value: int | str) -> int:
    """A field as one word."""
    return NAMES.index(value) if isinstance(value, str) else int(value)


def metadata_tensor(
    operator: str, fields: Mapping[str, int | str], lengths: Mapping[str, Sequence[int]]
) -> torch.Tensor:
    """int32[1024] that holds these fields and lists of lengths."""
    words = np.zeros(WORDS, np.int32)
    head = [MAGIC, checksum(operator.encode()), *map(number, fields.values())]
    words[: len(head)] = head
    at = FIELDS
    for values in lengths.values():
        row = np.asarray(values, np.int32)
        words[at : at + 2] = len(row), checksum(row.tobytes())
        words[at + 2 : at + 2 + min(len(row), LENGTHS)] = row[:LENGTHS]
        at += LENGTHS + 2
    return torch.from_numpy(words)


def checksum(data: bytes) -> int:
    """A checksum that an int32 holds."""
    return zlib.crc32(data) - 2**31


def check_metadata(
    operator: str,
    metadata: torch.Tensor,
    fields: Mapping[str, int | str],
    lengths: Mapping[str, Sequence[int]],
) -> None:
    """Refuse metadata that was built for anything else than this call, and say what differs."""
    check_tensor(operator, "metadata", metadata, (torch.int32,), (WORDS,))
    stored = metadata.numpy()
    if not stored.any():
        why = "all zeros, as a fallback without the metadata operator gives"
        raise StaleMetadataError(f"{operator}: metadata is {why}; {HINT}")
    if stored[0] != MAGIC or stored[1] != checksum(operator.encode()):
        raise StaleMetadataError(f"{operator}: metadata is not from {operator}_metadata; {HINT}")
    wrong = []
    for word, (name, value) in zip(stored[2:], fields.items(), strict=False):
        if word != number(value):
            built = NAMES[word] if isinstance(value, str) else int(word)
            wrong.append(f"{name} {built}, got {value}")
    at = FIELDS
    for name, values in lengths.items():
        wrong += differing_lengths(name, stored[at : at + LENGTHS + 2], np.asarray(values, np.int32))
        at += LENGTHS + 2
    if wrong:
        raise StaleMetadataError(f"{operator}: metadata was built for {'; '.join(wrong)}; {HINT}")


def differing_lengths(name: str, stored: np.ndarray, values: np.ndarray) -> list[str]:
    """What differs between stored and present lengths, in words; empty if nothing does."""
    if stored[0] != len(values):
        return [f"{stored[0]} {name}, got {len(values)}"]
    if stored[1] == checksum(values.tobytes()):
        return []
    kept = stored[2 : 2 + min(len(values), LENGTHS)]
    different = np.flatnonzero(kept != values[: len(kept)])
    if not len(different):
        return [f"other {name} after request {len(kept) - 1}"]
    request = int(different[0])
    return [f"{name}[{request}] {kept[request]}, got {values[request]}"]


def metadata_fake(**arguments: object) -> torch.Tensor:
    """Shape and dtype of a metadata tensor, beside the lengths if there are any."""
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    return torch.empty(WORDS, dtype=torch.int32, device=tensors[0].device if tensors else None)
