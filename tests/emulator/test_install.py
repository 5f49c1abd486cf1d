"""Installing, removing, and staying away from the real library."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dsacp_npu import emulator
from dsacp_npu.emulator.install import OPERATORS, TWO_STATE
from dsacp_npu.emulator.schemas import SCHEMAS, schemas_of


def present() -> bool:
    return hasattr(torch.ops._C_ascend, "compressor")


def in_fresh_process(program: str) -> None:
    """Run a program without the device package that torch would load by itself."""
    head = 'import os; os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"\n'
    done = subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_removed_operators_are_gone_and_can_come_back() -> None:
    """Also in the other form of the compressor, although torch.ops remembers what it was once asked for."""
    for form in ("current", "two_state", "current"):
        emulator.remove()
        assert not present()
        with pytest.raises(AttributeError):
            _ = torch.ops.npu.npu_rms_norm
        assert emulator.install(compressor=form)
        arguments = [argument.name for argument in torch.ops._C_ascend.compressor.default._schema.arguments]
        assert ("state_cache" in arguments) == (form == "current")
        assert ("kv_state" in arguments) == (form == "two_state")


def test_installing_twice_changes_nothing_and_the_other_form_is_refused() -> None:
    assert emulator.install()
    with pytest.raises(emulator.OperatorError, match=r"'two_state' must not be installed over 'current'.*remove"):
        emulator.install(compressor="two_state")
    with pytest.raises(emulator.OperatorError, match="compressor must be one of 'current', 'two_state', got 'old'"):
        emulator.install(compressor="old")


def test_the_outermost_block_removes() -> None:
    emulator.remove()
    with emulator.installed() as outer, emulator.installed() as inner:
        assert (outer, inner) == (True, True)
    assert not present()
    with emulator.installed():
        with emulator.installed():
            pass
        assert present()
        with pytest.raises(emulator.OperatorError, match="two_state"), emulator.installed(compressor="two_state"):
            pass
        assert present()
    assert not present()
    emulator.install()
    with emulator.installed():
        pass
    assert present()


def test_a_block_that_fails_removes_too() -> None:
    emulator.remove()
    with pytest.raises(KeyError), emulator.installed():
        raise KeyError
    assert not present()


@pytest.mark.slow
def test_importing_defines_nothing() -> None:
    in_fresh_process(
        "import torch, dsacp_npu.emulator\n"
        "assert not hasattr(torch.ops._C_ascend, 'compressor') and not hasattr(torch.ops.npu, 'npu_rms_norm')\n"
    )


@pytest.mark.slow
def test_inert_where_an_operator_exists() -> None:
    in_fresh_process(
        "import torch\n"
        "real = torch.library.Library('npu', 'FRAGMENT')\n"
        "real.define('npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)')\n"
        "from dsacp_npu import emulator\n"
        "assert emulator.real_library() == 'torch.ops.npu.npu_rms_norm'\n"
        "assert emulator.install() is False\n"
        "with emulator.installed() as here: assert here is False\n"
        "emulator.remove()\n"
        "assert hasattr(torch.ops.npu, 'npu_rms_norm') and not hasattr(torch.ops._C_ascend, 'compressor')\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch_npu", "vllm_ascend"])
def test_inert_where_a_library_can_be_imported_and_does_not_import_it(package: str, tmp_path: object) -> None:
    """Its schemas come when it loads; ours would then stand in their way."""
    in_fresh_process(
        f"import pathlib, sys\n"
        f"pathlib.Path({str(tmp_path)!r}, '{package}.py').write_text('raise SystemExit(3)')\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch\n"
        "from dsacp_npu import emulator\n"
        f"assert emulator.real_library() == '{package}'\n"
        "assert emulator.install() is False and not hasattr(torch.ops._C_ascend, 'compressor')\n"
    )


@pytest.mark.parametrize("form", ["current", "two_state"])
def test_implementations_have_their_schemas_arguments(form: str) -> None:
    """Names, order and defaults: the dispatcher leaves out what equals a default of the schema."""
    import inspect

    for namespace in SCHEMAS:
        for text in schemas_of(namespace, compressor=form):
            schema = torch._C.parse_schema(text)
            function, _ = OPERATORS[namespace][schema.name]
            if (schema.name, form) == ("compressor", "two_state"):
                function, _ = TWO_STATE
            mine = inspect.signature(function).parameters.values()
            empty = inspect.Parameter.empty
            assert [p.name for p in mine] == [a.name for a in schema.arguments]
            wanted = [a.default_value if a.has_default_value() else empty for a in schema.arguments]
            assert [p.default for p in mine] == wanted, schema.name


def test_schemas_are_registered_as_they_are_written() -> None:
    """Both texts are read by PyTorch's own parser, so that spelling of defaults does not matter."""
    for namespace, texts in SCHEMAS.items():
        for text in texts:
            written = torch._C.parse_schema(f"{namespace}::{text}")
            assert getattr(getattr(torch.ops, namespace), text.partition("(")[0]).default._schema == written


def test_a_wrong_keyword_is_refused_with_the_schema() -> None:
    with pytest.raises(RuntimeError, match=r"npu_rms_norm\(\) got an unexpected|npu_rms_norm"):
        torch.ops.npu.npu_rms_norm(torch.ones(2, 4), torch.ones(4), eps=1e-6)
