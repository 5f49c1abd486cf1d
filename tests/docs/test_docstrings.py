"""Every public function says what a caller must know, in one order, with an example that runs."""

from __future__ import annotations

import inspect
import re

import pytest

import dsacp_ref

SECTIONS = ("Args:", "Returns:", "Raises:", "Source:", ">>>")


def public(kind: str) -> list[str]:
    wanted = inspect.isfunction if kind == "function" else inspect.isclass
    return [name for name in dsacp_ref.__all__ if wanted(getattr(dsacp_ref, name))]


def is_arithmetic(value: object) -> bool:
    return value.__module__ not in ("dsacp_ref.spec", "dsacp_ref.config")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", public("function"))
def test_a_function_has_a_sentence_its_sections_in_order_and_an_example(name: str) -> None:
    function = getattr(dsacp_ref, name)
    text = inspect.getdoc(function) or ""
    sentence = text.split("\n\n")[0]
    assert re.match(r"[A-Z`].*[.:]$", sentence, re.DOTALL), "starts with a sentence"
    wanted = [section for section in SECTIONS if is_arithmetic(function) or section in ("Args:", "Returns:", ">>>")]
    if name.startswith("check_"):
        wanted = ["Args:", "Raises:", ">>>"]
    if not inspect.signature(function).parameters:
        wanted.remove("Args:")
    places = [text.find(section) for section in wanted if section != "Raises:" or "Raises:" in text]
    assert -1 not in places, f"{name} lacks one of {wanted}"
    assert places == sorted(places), f"{name}: sections in the order {wanted}"


@pytest.mark.parametrize("name", public("function"))
def test_every_argument_is_described(name: str) -> None:
    function = getattr(dsacp_ref, name)
    text = inspect.getdoc(function) or ""
    arguments = text.partition("Args:")[2].split("Returns:")[0]
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^\s+{parameter}[:,]|[ ,]{parameter}[:,]", arguments, re.MULTILINE), f"{name}: {parameter}"


@pytest.mark.parametrize("name", public("class"))
def test_a_record_describes_its_fields_and_has_an_example(name: str) -> None:
    record = getattr(dsacp_ref, name)
    text = inspect.getdoc(record) or ""
    assert ">>>" in text
    if issubclass(record, tuple):
        for field in record._fields:
            assert re.search(rf"^\s+{field}: ", text, re.MULTILINE), f"{name}.{field}"
