"""Shared words: the error classes, and checks that name the argument, the rule, the value and the fix.

Plain Python. The checks read only ``.shape`` and ``.dtype``, so they serve numpy arrays and torch tensors alike and
both packages raise the same type with the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

__all__ = [
    "ContractError",
    "UnsupportedError",
    "check_array",
    "check_bool",
    "check_choice",
    "check_int",
    "check_number",
    "check_record",
    "contract_error",
    "dtype_name",
]

INT32_MAX = 2**31 - 1


class ContractError(ValueError):
    """An argument breaks its contract: shape, dtype or value.

    >>> raise ContractError("cp_size must be an int >= 1, got 0")
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: cp_size must be an int >= 1, got 0
    """


class UnsupportedError(NotImplementedError):
    """The call is legal, but this backend, model or combination does not support it.

    >>> raise UnsupportedError("compress_ratio 2 is V4.1")
    Traceback (most recent call last):
    dsacp_ref.spec.UnsupportedError: compress_ratio 2 is V4.1
    """


def contract_error(name: str, rule: str, got: object, hint: str = "") -> ContractError:
    """The error that says which argument, which rule, which value, and what to try.

    Args:
        name: the argument's name, as in the signature.
        rule: what it must do, starting after "must" ("be an int >= 1").
        got: the offending value, or the part of it that breaks the rule.
        hint: what to try; may be empty.

    Returns:
        ContractError, to be raised by the caller.

    >>> str(contract_error("cp_rank", "be below cp_size 4", 4, "ranks count from 0"))
    'cp_rank must be below cp_size 4, got 4; ranks count from 0'
    """
    text = f"{name} must {rule}, got {got}"
    return ContractError(f"{text}; {hint}" if hint else text)


def dtype_name(array: Any) -> str:
    """The dtype's bare name, the same for numpy and torch.

    Args:
        array: anything with a ``dtype``.

    Returns:
        str, such as ``"int32"``.

    >>> import numpy as np
    >>> dtype_name(np.zeros(1, np.int32))
    'int32'
    """
    return bare_name(array.dtype)


@lru_cache(maxsize=64)
def bare_name(dtype: Any) -> str:
    """The name of a dtype; spelling it out costs more than the rest of a check."""
    return str(dtype).removeprefix("torch.")


def check_array(name: str, array: Any, dtypes: Sequence[str], shape: Sequence[int | str], hint: str = "") -> None:
    """Refuse anything that is not an array of one of these dtypes and this shape.

    Args:
        name: the argument's name.
        array: numpy array or torch tensor; only ``.shape`` and ``.dtype`` are read.
        dtypes: accepted dtype names, such as ``("float32", "float64")``.
        shape: one entry per axis: an int that must match, or a word that names a free axis.
        hint: added to a shape error.

    Raises:
        ContractError: not an array, wrong dtype, wrong number of axes or a wrong size.

    >>> import numpy as np
    >>> check_array("seq_lens", np.zeros(4, np.int32), ("int32",), (3,), "one entry per request")
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: seq_lens must have shape [3], got [4]; one entry per request
    """
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise contract_error(name, "be an array", type(array).__name__, f"dtype {' or '.join(dtypes)}")
    got_dtype = dtype_name(array)
    if got_dtype not in dtypes:
        raise contract_error(name, f"have dtype {' or '.join(dtypes)}", got_dtype, f"cast {name} first")
    got = tuple(array.shape)
    if len(got) == len(shape):
        for want, size in zip(shape, got, strict=True):
            if not isinstance(want, str) and want != size:
                break
        else:
            return
    raise contract_error(name, f"have shape [{', '.join(map(str, shape))}]", list(got), hint)


def check_int(name: str, value: object, minimum: int | None = None, maximum: int | None = None, hint: str = "") -> int:
    """The value as a Python int, refused when it is no integer or outside its range.

    Args:
        name: the argument's name.
        value: a Python or numpy integer; ``bool`` and arrays are refused.
        minimum: smallest legal value, or None.
        maximum: largest legal value, or None.
        hint: what to try.

    Returns:
        int, the same value.

    Raises:
        ContractError: not an integer, or out of range.

    >>> check_int("cp_size", 0, 1)
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: cp_size must be an int >= 1, got 0
    """
    # An exact int in range is the common case and costs nothing; only a refusal pays for its sentence.
    if type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool)):
        number = int(value)
        if (minimum is None or number >= minimum) and (maximum is None or number <= maximum):
            return number
    rule = "be an int"
    if minimum is not None and maximum is not None:
        rule = f"be an int in [{minimum}, {maximum}]"
    elif minimum is not None:
        rule = f"be an int >= {minimum}"
    elif maximum is not None:
        rule = f"be an int <= {maximum}"
    got = value if isinstance(value, Integral) and not isinstance(value, bool) else f"{type(value).__name__} {value!r}"
    raise contract_error(name, rule, got, hint)


def check_number(
    name: str, value: object, *, above: float | None = None, at_least: float | None = None, hint: str = ""
) -> float:
    """The value as a Python float, refused when it is no finite number or outside its range.

    Args:
        name: the argument's name.
        value: a Python or numpy real number; ``bool``, NaN and infinities are refused.
        above: exclusive lower bound, or None.
        at_least: inclusive lower bound, or None.
        hint: what to try.

    Returns:
        float, the same value.

    Raises:
        ContractError: not a finite number, or out of range.

    >>> check_number("softmax_scale", 0, above=0.0)
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: softmax_scale must be a finite number > 0.0, got 0
    """
    rule = "be a finite number"
    if above is not None:
        rule += f" > {above}"
    if at_least is not None:
        rule += f" >= {at_least}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise contract_error(name, rule, f"{type(value).__name__} {value!r}", hint)
    number = float(value)
    finite = number == number and abs(number) != float("inf")
    if not finite or (above is not None and number <= above) or (at_least is not None and number < at_least):
        raise contract_error(name, rule, value, hint)
    return number


def check_bool(name: str, value: object) -> bool:
    """The value, refused when it is no bool: the word ``"False"`` would read as true.

    Args:
        name: the argument's name.
        value: True or False.

    Returns:
        bool, the same value.

    Raises:
        ContractError: anything else.

    >>> check_bool("causal", "False")
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: causal must be true or false, got str 'False'
    """
    if not isinstance(value, bool):
        raise contract_error(name, "be true or false", f"{type(value).__name__} {value!r}")
    return value


def check_record(name: str, value: object, kind: type) -> None:
    """Refuse anything that is not this record.

    Args:
        name: the argument's name.
        value: what was given.
        kind: the record's class.

    Raises:
        ContractError: another type.

    >>> check_record("batch", None, dict)
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: batch must be of type dict, got NoneType
    """
    if not isinstance(value, kind):
        raise contract_error(name, f"be of type {kind.__name__}", type(value).__name__)


def check_choice(name: str, value: object, choices: Sequence[str], hint: str = "") -> str:
    """The value, refused when it is not one of the named choices.

    Args:
        name: the argument's name.
        value: the word given.
        choices: the legal words.
        hint: what to try.

    Returns:
        str, the same word.

    Raises:
        ContractError: not one of the choices.

    >>> check_choice("empty_extent", "none", ("zero", "prefix"))
    Traceback (most recent call last):
    dsacp_ref.spec.ContractError: empty_extent must be one of 'zero', 'prefix', got 'none'
    """
    if not isinstance(value, str) or value not in choices:
        raise contract_error(name, f"be one of {', '.join(map(repr, choices))}", repr(value), hint)
    return value
