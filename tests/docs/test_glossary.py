"""The glossary and the code use the same words."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import dsacp_ref

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"
NEVER_ALONE = {"indices", "lens", "offsets", "mask", "metadata", "info"}
# Words of plain Python; `spec` and `config` are about words, files and flags, not about data.
PLAIN_MODULES = {"dsacp_ref.spec", "dsacp_ref.config"}

pytestmark = pytest.mark.skipif(
    not GLOSSARY.exists(), reason="docs/ is missing: the tests run beside an installed wheel"
)


def glossary_names() -> set[str]:
    first_cells = re.findall(r"^\| (`.*?) \|", GLOSSARY.read_text(), re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def public_functions() -> list[str]:
    return [
        name
        for name in dsacp_ref.__all__
        if inspect.isfunction(getattr(dsacp_ref, name)) and getattr(dsacp_ref, name).__module__ not in PLAIN_MODULES
    ]


@pytest.mark.parametrize("name", public_functions())
def test_every_argument_is_in_the_glossary(name: str) -> None:
    arguments = set(inspect.signature(getattr(dsacp_ref, name)).parameters)
    assert arguments <= glossary_names(), f"add to docs/glossary.md: {sorted(arguments - glossary_names())}"
    assert not arguments & NEVER_ALONE


def test_every_name_of_the_glossary_is_used() -> None:
    used: set[str] = set()
    for name in dsacp_ref.__all__:
        value = getattr(dsacp_ref, name)
        if inspect.isfunction(value):
            used |= {name, *inspect.signature(value).parameters}
        used |= set(getattr(value, "_fields", ())) | set(getattr(value, "__dataclass_fields__", ()))
    assert glossary_names() <= used, f"no function or record uses {sorted(glossary_names() - used)}"
