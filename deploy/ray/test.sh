#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deploy/ray on a simulated cluster of three nodes. Ray is large, so this is no
# part of `make test`; it is installed once, into build/ray, or taken from the
# environment that RAY_VENV names.
set -euo pipefail
cd "$(dirname "$0")/../.."
want="ray[serve]==2.60.0 numpy setuptools>=77"
venv=${RAY_VENV:-$PWD/build/ray/venv}
if [ -z "${RAY_VENV:-}" ] && [ "$(cat build/ray/installed 2>/dev/null)" != "$want" ]; then
  python3 -m venv "$venv"
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q --disable-pip-version-check $want
  echo "$want" > build/ray/installed
fi
"$venv/bin/pip" install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall ./python
rm -rf python/build python/ringbatch.egg-info
export PATH="$venv/bin:$PATH" RAY_USAGE_STATS_ENABLED=0
cd deploy/ray && exec "$venv/bin/python" check.py "$@"
