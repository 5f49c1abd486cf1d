"""What can be said where Triton is missing: the help, and the command that gets what is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_without_triton_there_is_help_and_a_command_that_helps() -> None:
    script = "import sys; sys.modules['triton'] = None; from dsacp_npu.__main__ import main; sys.exit(main())"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, "compile-check", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert "--own MODULE:KERNEL" in run("--help").stdout
    done = run()
    assert done.returncode == 2
    assert "triton-ascend is not installed; pip install 'dsacp[ascend]'" in done.stderr
