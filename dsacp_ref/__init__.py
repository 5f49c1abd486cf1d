"""The definition of context-parallel DeepSeek Sparse Attention: pure functions over numpy arrays.

Every public name of the arithmetic modules is here too: ``dsacp_ref.local_extents`` is
``dsacp_ref.extents.local_extents``. A module is imported when one of its names is first asked for, so that its torch
twin, which shares only `spec`, `config`, `mla_config` and `prefill`, pays for nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` finds, for those who only read
    from dsacp_ref.attention import *  # noqa: F403
    from dsacp_ref.block import *  # noqa: F403
    from dsacp_ref.compressor import *  # noqa: F403
    from dsacp_ref.config import *  # noqa: F403
    from dsacp_ref.exchange import *  # noqa: F403
    from dsacp_ref.extents import *  # noqa: F403
    from dsacp_ref.fp8 import *  # noqa: F403
    from dsacp_ref.indexer import *  # noqa: F403
    from dsacp_ref.layer import *  # noqa: F403
    from dsacp_ref.mla import *  # noqa: F403
    from dsacp_ref.mla_config import *  # noqa: F403
    from dsacp_ref.mla_layer import *  # noqa: F403
    from dsacp_ref.mla_stack import *  # noqa: F403
    from dsacp_ref.paging import *  # noqa: F403
    from dsacp_ref.partition import *  # noqa: F403
    from dsacp_ref.prefill import *  # noqa: F403
    from dsacp_ref.quant import *  # noqa: F403
    from dsacp_ref.rope import *  # noqa: F403
    from dsacp_ref.spec import *  # noqa: F403
    from dsacp_ref.visibility import *  # noqa: F403

    __version__: str

# In the order in which they import one another, so that looking for a name loads little beyond its own module.
_MODULES = (
    "spec",
    "config",
    "mla_config",
    "prefill",
    "partition",
    "extents",
    "visibility",
    "paging",
    "rope",
    "quant",
    "fp8",
    "compressor",
    "indexer",
    "attention",
    "mla",
    "exchange",
    "layer",
    "block",
    "mla_layer",
    "mla_stack",
)


def _module(name: str) -> Any:
    """One of the modules, imported now at the latest."""
    return import_module(f"dsacp_ref.{name}")


def _public_names() -> list[str]:
    """The public names of all modules."""
    return list(dict.fromkeys(name for module in _MODULES for name in _module(module).__all__))


def _found(name: str) -> Any:
    """What a name stands for that has not been asked for yet."""
    if name == "__version__":
        return import_module("importlib.metadata").version("dsacp")
    if name == "__all__":
        return _public_names()
    if name in _MODULES:
        return _module(name)
    for module in () if name.startswith("_") else _MODULES:
        if name in _module(module).__all__:
            return getattr(_module(module), name)
    raise AttributeError(f"module 'dsacp_ref' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is here, and what would be on asking."""
    return sorted({*globals(), *_MODULES, *_public_names(), "__all__", "__version__"})


if not TYPE_CHECKING:  # a type checker would take any name at all for found

    def __getattr__(name: str) -> Any:
        """A module, a public name of one, `__all__` or `__version__`; kept once found."""
        value = globals()[name] = _found(name)
        return value
