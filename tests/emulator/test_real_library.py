"""Where the real library is loaded, its schemas are ours."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dsacp_npu.emulator.schemas import SCHEMAS, TWO_STATE_COMPRESSOR

PACKAGES = {"_C_ascend": "vllm_ascend", "npu": "torch_npu"}


@pytest.mark.parametrize("namespace", sorted(SCHEMAS))
def test_the_real_schemas_are_these(namespace: str) -> None:
    """Both forms of the compressor are known; anything else of the same name is another contract."""
    package = PACKAGES[namespace]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: torch.ops.{namespace} is compared where it is")
    operators = getattr(torch.ops, namespace)
    texts = {text.partition("(")[0]: text for text in SCHEMAS[namespace]}
    for name, text in texts.items():
        if not hasattr(operators, name):
            continue  # availability differs by version
        known = [text] if name != "compressor" else [text, TWO_STATE_COMPRESSOR]
        assert getattr(operators, name).default._schema in [
            torch._C.parse_schema(f"{namespace}::{schema}") for schema in known
        ]
