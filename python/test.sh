#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks style and types of the package, installs the wheel into its own environment
# and runs the tests and the examples with it. Arguments go to pytest.
set -eu
venv=${RINGBATCH_VENV:+$(realpath -m "$RINGBATCH_VENV")}
cd "$(dirname "$0")"
venv=${venv:-$(realpath -m ../build/python-venv)}
download() { ../hack/venv.sh "$venv" "$@"; }
download -c tests/constraints.txt "numpy>=1.22" pytest pytest-timeout pytest-xdist gunicorn fastapi uvicorn httpx pillow onnxruntime onnx websockets msgpack "setuptools>=77"
download --no-deps openpi-client==0.1.2 # robots.py --door; it would ask for an old NumPy, and runs with any
if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then # mypy needs 3.10
	download ruff==0.17.4 mypy==2.4.1
	"$venv/bin/ruff" check --quiet ringbatch
	"$venv/bin/mypy"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
rm -rf build ringbatch.egg-info
unset PYTHONPATH RINGBATCH_LIBRARY RINGBATCH_BINARY RINGBATCH_SOCKET || true
cd tests
pytest() { "$venv/bin/python" -m pytest -c ../pyproject.toml --rootdir=. --timeout 300 "$@"; }
if [ $# -gt 0 ]; then
	pytest . "$@"
	exit
fi
# Two files at once. Each file shares its broker and its served processes.
status=0
pytest -n 2 --dist loadfile . || status=$?
echo "the client's tests without the extension, over ctypes"
export RINGBATCH_CTYPES=1
pytest -n 2 --dist loadfile test_client.py test_calls.py test_views.py test_many.py test_hostile.py test_signals.py test_shared.py test_device.py test_state.py || status=$?
exit $status
