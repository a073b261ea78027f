#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A day of an operator, in a few seconds: start, watch, change, replace workers,
# upgrade the broker under load. Nobody who asks notices more than a pause.
#
#   examples/operations/day.sh [the ringbatch command]
set -euo pipefail
ringbatch=$(realpath "${1:-$(command -v ringbatch)}")
day=$(mktemp -d)
export RINGBATCH_SOCKET=$day/broker.sock
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$day"' EXIT
cd "$day"

cat > ringbatch.toml <<TOML
[[model]]
name = "affine"
inputs = ["x:f32[16]"]
outputs = ["y:f32[16]"]
max_batch_size = 32

[[model.worker]]
command = ["$ringbatch", "worker", "affine", "--scale", "2"]
instances = 2
TOML

echo "# start"
"$ringbatch" broker --config ringbatch.toml --log-level error &
old=$!
until [ -S "$RINGBATCH_SOCKET" ]; do sleep 0.05; done
"$ringbatch" ready affine --wait 30s

echo "# watch"
"$ringbatch" infer affine 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
"$ringbatch" stats

echo "# change"
"$ringbatch" set affine wait_time=3ms
"$ringbatch" scale affine 3
"$ringbatch" restart affine # new code, new weights: one by one, none missing

echo "# upgrade"
"$ringbatch" broker --config ringbatch.toml --log-level error --take-over &
wait $old # it answers what it has accepted, and ends
"$ringbatch" ready affine --wait 30s
"$ringbatch" infer affine 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
