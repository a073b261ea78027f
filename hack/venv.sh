#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# hack/venv.sh DIR ARGUMENTS…: makes a virtual environment, unless it is there, and installs packages with uv, which
# unpacks and compiles on all cores: where $PYTHONDONTWRITEBYTECODE is set, each process would compile what it imports. The
# arguments are those of `uv pip install`.
set -euo pipefail
again=$(dirname "$(realpath "$0")")/again.sh
dir=$1
shift
"$dir/bin/python" -m pip --version >/dev/null 2>&1 || python3 -m venv "$dir" # none yet, or half of one
[ -x "$dir/bin/uv" ] || "$again" "$dir/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.8
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120}
exec "$again" "$dir/bin/uv" pip install --quiet --compile-bytecode --python "$dir/bin/python" "$@"
