"""The Triton kernels: in the interpreter, and as what the Ascend compiler makes of them.

Triton-Ascend wants an environment of its own (`make ascend`), and kernels are either interpreted or compiled in a
process, so there are two runs::

    TRITON_INTERPRET=1 .venv-ascend/bin/python -m pytest -n auto tests/kernels tests/ascend
    .venv-ascend/bin/python -m pytest -n auto tests/kernels tests/ascend

The first runs every case (`<concept>_cases.py`) and every property test of a launcher (`test_<concept>.py`) in the
interpreter, with its faults repaired. The second executes every case on the CPU after two levels of the compiler
(`test_lowered.py`) and compiles every tile that a launch can use for a chip of A2, A3 and A5 (`test_compiled.py`).
Anywhere else everything here is skipped, with the reason. A new kernel needs a case and a `Compilation`; both are found
by their place, and `test_environment.py` tells if one is missing.
"""
