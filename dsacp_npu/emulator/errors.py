"""What an emulated operator answers where the real one refuses, reads past its memory, or works from stale metadata."""

from __future__ import annotations

__all__ = ["OperatorError", "OutOfRangeError", "StaleMetadataError"]


class OperatorError(RuntimeError):
    """The operator refuses the call: a host check fails, or what it would do is not known.

    >>> raise OperatorError("npu_sparse_attn_sharedkv: sinks must be given, got None")
    Traceback (most recent call last):
    dsacp_npu.emulator.errors.OperatorError: npu_sparse_attn_sharedkv: sinks must be given, got None
    """


class OutOfRangeError(OperatorError, IndexError):
    """A read or write outside of a tensor: a memory fault on the device, or another request's data.

    Fields:
        tensor: name of the tensor, as in the operator's schema.
        request: number of the request in the batch; -1 where the operator knows no requests.
        position: the position, entry, row or column that lies outside.
    """

    def __init__(self, text: str, tensor: str = "", request: int = -1, position: int = -1) -> None:
        """Keep beside the text what it names."""
        super().__init__(text)
        self.tensor, self.request, self.position = tensor, request, position


class StaleMetadataError(OperatorError):
    """The metadata was built for another call. On the device rows stay uncomputed, without a word."""


def refusal(operator: str, name: str, rule: str, got: object, hint: str = "") -> OperatorError:
    """The error that says which operator, which argument, which rule, which value, and what to try."""
    text = f"{operator}: {name} must {rule}, got {got}"
    return OperatorError(f"{text}; {hint}" if hint else text)


def out_of_range(operator: str, tensor: str, request: int, position: int, why: str) -> OutOfRangeError:
    """The error of a read or write outside of a tensor."""
    where = f"request {request}, position {position}" if request >= 0 else f"row {position}"
    return OutOfRangeError(f"{operator}: {tensor}, {where}: {why}", tensor, request, position)
