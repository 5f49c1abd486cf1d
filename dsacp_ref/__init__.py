"""The definition of context-parallel DeepSeek Sparse Attention: pure functions over numpy arrays.

Every public name of the arithmetic modules is here too: ``dsacp_ref.local_extents`` is
``dsacp_ref.extents.local_extents``.
"""

from importlib.metadata import version

from dsacp_ref import (
    attention,
    compressor,
    config,
    exchange,
    extents,
    indexer,
    layer,
    paging,
    partition,
    quant,
    rope,
    spec,
    visibility,
)
from dsacp_ref.attention import *  # noqa: F403
from dsacp_ref.compressor import *  # noqa: F403
from dsacp_ref.config import *  # noqa: F403
from dsacp_ref.exchange import *  # noqa: F403
from dsacp_ref.extents import *  # noqa: F403
from dsacp_ref.indexer import *  # noqa: F403
from dsacp_ref.layer import *  # noqa: F403
from dsacp_ref.paging import *  # noqa: F403
from dsacp_ref.partition import *  # noqa: F403
from dsacp_ref.quant import *  # noqa: F403
from dsacp_ref.rope import *  # noqa: F403
from dsacp_ref.spec import *  # noqa: F403
from dsacp_ref.visibility import *  # noqa: F403

__version__ = version("dsacp")

_MODULES = (
    spec,
    config,
    partition,
    extents,
    visibility,
    paging,
    rope,
    quant,
    compressor,
    indexer,
    attention,
    exchange,
    layer,
)
__all__ = list(dict.fromkeys(name for module in _MODULES for name in module.__all__))
