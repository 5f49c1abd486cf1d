"""Putting the emulated operators into `torch.ops`, and taking them away again. Nothing happens at import."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dsacp_npu._tensors import torch
from dsacp_npu.emulator import attention, compressor, fingerprint, indexer, latent_attention, rows, token_indexer
from dsacp_npu.emulator.errors import OperatorError
from dsacp_npu.emulator.schemas import SCHEMAS, schemas_of

__all__ = ["install", "installed", "real_library", "remove"]

Pair = tuple[Callable[..., Any], Callable[..., Any]]

# Packages that bring the real operators. To define a schema before one of them loads would abort the process.
REAL_LIBRARIES = ("torch_npu", "vllm_ascend")

# Operator -> (implementation, fake implementation). An implementation has its schema's argument names and defaults.
OPERATORS: dict[str, dict[str, Pair]] = {
    "_C_ascend": {
        "npu_sparse_attn_sharedkv": (attention.attention, attention.attention_fake),
        "npu_sparse_attn_sharedkv_metadata": (attention.attention_metadata, fingerprint.metadata_fake),
        "npu_vllm_quant_lightning_indexer": (indexer.indexer, indexer.indexer_fake),
        "npu_vllm_quant_lightning_indexer_metadata": (indexer.indexer_metadata, fingerprint.metadata_fake),
        "npu_lightning_indexer": (token_indexer.token_indexer, token_indexer.token_indexer_fake),
        "npu_lightning_indexer_quant": (token_indexer.coded_token_indexer, indexer.plain_indexer_fake),
        "npu_sparse_flash_attention": (latent_attention.latent_attention, latent_attention.latent_attention_fake),
        "compressor": (compressor.compressor, compressor.compressor_fake),
        "compressor_metadata": (compressor.compressor_metadata, compressor.compressor_metadata_fake),
        "inplace_partial_rotary_mul": (rows.partial_rotary, rows.nothing_fake),
        "npu_rms_norm_dynamic_quant": (rows.rms_norm_dynamic_quant, rows.rms_norm_dynamic_quant_fake),
        "npu_scatter_nd_update_v2": (rows.scatter_v2, rows.nothing_fake),
    },
    "npu": {
        "npu_quant_lightning_indexer": (indexer.plain_indexer, indexer.plain_indexer_fake),
        "npu_lightning_indexer": (token_indexer.token_indexer, token_indexer.token_indexer_fake),
        "npu_sparse_flash_attention": (
            latent_attention.plain_latent_attention,
            latent_attention.latent_attention_fake,
        ),
        "npu_transpose_batchmatmul": (rows.transpose_batchmatmul, rows.transpose_batchmatmul_fake),
        "npu_quant_matmul": (rows.quant_matmul, rows.quant_matmul_fake),
        "npu_dynamic_quant": (rows.dynamic_quant, rows.dynamic_quant_fake),
        "npu_rms_norm": (rows.rms_norm, rows.rms_norm_fake),
        "npu_scatter_nd_update_": (rows.scatter, rows.scatter_fake),
    },
}
TWO_STATE: Pair = (compressor.two_state_compressor, compressor.two_state_compressor_fake)
FORMS = ("current", "two_state")


class Registration:
    """What is in `torch.ops` because of this module: the form of the compressor, and the libraries that hold it."""

    form: str | None = None
    libraries: tuple[torch.library.Library, ...] = ()


def real_library() -> str | None:
    """What brings the real operators here, or None: a package that can be imported, or an operator that exists."""
    for package in REAL_LIBRARIES:
        if importlib.util.find_spec(package) is not None:
            return package
    if Registration.form is None:
        for namespace, operators in OPERATORS.items():
            for name in operators:
                if hasattr(getattr(torch.ops, namespace), name):
                    return f"torch.ops.{namespace}.{name}"
    return None


def install(*, compressor: str = "current") -> bool:
    """Register the emulated operators for CPU tensors.

    Args:
        compressor: the form of `_C_ascend.compressor`: "current" (one state) or "two_state" (the older one).

    Returns:
        bool: False, and nothing is done, where the real library is present: it is looked for first.

    Raises:
        OperatorError: an unknown form, or the other form is installed.

    >>> from dsacp_npu.emulator import installed
    >>> with installed() as emulated:
    ...     lengths = torch.tensor([5], dtype=torch.int32)
    ...     metadata = torch.ops._C_ascend.npu_vllm_quant_lightning_indexer_metadata(
    ...         64, 1, 128, 0, 0, lengths, lengths, layout_query="TND", layout_key="PA_BSND", cmp_ratio=4
    ...     )
    >>> metadata.shape
    torch.Size([1024])
    """
    if compressor not in FORMS:
        raise OperatorError(f"compressor must be one of {', '.join(map(repr, FORMS))}, got {compressor!r}")
    if Registration.form is not None:
        if Registration.form != compressor:
            raise OperatorError(
                f"compressor {compressor!r} must not be installed over {Registration.form!r}; call remove() first"
            )
        return True
    if real_library() is not None:
        return False
    Registration.libraries = tuple(registered(namespace, compressor) for namespace in SCHEMAS)
    Registration.form = compressor
    return True


def registered(namespace: str, form: str) -> torch.library.Library:
    """A library that defines and implements the operators of one namespace, for as long as it is kept."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema in schemas_of(namespace, compressor=form):
        name = schema.partition("(")[0]
        function, fake = OPERATORS[namespace][name]
        if name == "compressor" and form == "two_state":
            function, fake = TWO_STATE
        library.define(schema)
        # Metadata may be asked for without any tensor: then there is no device to choose an implementation by.
        library.impl(name, function, "CompositeExplicitAutograd" if name.endswith("_metadata") else "CPU")
        torch.library.register_fake(f"{namespace}::{name}", by_name(function, fake), lib=library)
    return library


def by_name(function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake implementation, called with every argument by its name."""
    signature = inspect.signature(function)

    def called(*args: Any, **kwargs: Any) -> Any:
        """Fill in the defaults, which the dispatcher leaves out."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return fake(**bound.arguments)

    return called


def remove() -> None:
    """Take the emulated operators out of `torch.ops`; without them installed, do nothing."""
    for library in Registration.libraries:
        library._destroy()  # also forgets what torch.ops has cached
    Registration.libraries, Registration.form = (), None


@contextmanager
def installed(*, compressor: str = "current") -> Iterator[bool]:
    """Install for the length of a block; inside another block, or after `install`, leave the removing to that one.

    Args:
        compressor: as in `install`.

    Yields:
        bool: what `install` returned.
    """
    outermost = Registration.form is None
    done = install(compressor=compressor)
    try:
        yield done
    finally:
        if outermost:
            remove()
