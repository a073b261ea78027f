#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests a relay to a real Triton server, from the Python package nvidia-pytriton. It has
# 2 GB with its dependencies, so `make test` leaves it out. Installed once, into
# build/triton, or taken from the environment of TRITON_VENV.
set -euo pipefail
cd "$(dirname "$0")/../.."
want="nvidia-pytriton==0.7.0 numpy"
venv=${TRITON_VENV:-$PWD/build/triton/venv}
if [ -z "${TRITON_VENV:-}" ] && [ "$(cat build/triton/installed 2>/dev/null)" != "$want" ]; then
  python3 -m venv "$venv"
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q --disable-pip-version-check $want
  echo "$want" > build/triton/installed
fi
TRITON_VENV=$venv TRITON_PACKAGES=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
  TRITON_LIBPYTHON=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))') \
  TRITON_STUB=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
  exec go test -count=1 -v -run Triton ./relay
