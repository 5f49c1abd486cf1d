"""``python -m dsacp_npu explain``: the definition's own command, beside the others."""

from dsacp_ref.__main__ import add_arguments, run

__all__ = ["add_arguments", "run"]
