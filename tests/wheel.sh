#!/usr/bin/env bash
# The tests against the built wheel, from a folder where the checkout is out of reach.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT

rm -rf build dist
"$python" -m build --wheel --outdir dist . > "$elsewhere/build.log" || { cat "$elsewhere/build.log"; exit 1; }
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$elsewhere/site" dist/dsacp-*.whl
cp -r tests pyproject.toml "$elsewhere"

cd "$elsewhere"
export PYTHONPATH=$elsewhere/site OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
"$python" -c 'import dsacp_ref, dsacp_npu, os, sys
for package in (dsacp_ref, dsacp_npu):
    assert package.__file__.startswith(os.environ["PYTHONPATH"]), package.__file__
    assert os.path.exists(os.path.join(os.path.dirname(package.__file__), "py.typed")), package.__file__
print("testing the wheel of dsacp", dsacp_ref.__version__)'
"$python" -m pytest -q -n auto --pyargs tests dsacp_ref dsacp_npu "$@"
