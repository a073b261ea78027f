#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The steps of an operator with the units; test.sh runs them under its systemd.
set -uo pipefail
export RINGBATCH_SOCKET=/run/ringbatch/broker.sock
failed=0

# expect TEXT COMMAND: the command must succeed within 30 s and print the text.
expect() {
  local text=$1 out; shift
  for _ in $(seq 150); do
    if out=$("$@" 2>&1) && [[ $out == *"$text"* ]]; then echo "ok    $*"; return; fi
    sleep 0.2
  done
  echo "FAIL  $*, want: $text"; echo "$out" | tail -5
  failed=1
}
as_ringbatch() { runuser -u ringbatch -- ringbatch "$@"; }
value() { systemctl show -P "$1" "$2"; }
main_pid() { value MainPID ringbatch-broker; }
other_pid() { [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ]; }
nobody_left() { ! pgrep -u ringbatch >/dev/null; }

expect "" systemctl start ringbatch-broker ringbatch-gateway ringbatch-worker@echo
for unit in ringbatch-broker ringbatch-gateway ringbatch-worker@echo; do expect active systemctl is-active $unit; done
expect notify value Type ringbatch-broker
expect ready as_ringbatch ready affine echo --wait 30s
expect "2 4 6 8" as_ringbatch infer affine 1 2 3 4
expect '"name":"ringbatch"' curl -s -m 5 http://127.0.0.1:8000/v2
expect 'ringbatch_up 1' curl -s -m 5 http://127.0.0.1:8000/metrics

# Reload: another command, without a gap.
pid=$(main_pid)
sed -i 's/"2"/"3"/' /etc/ringbatch/ringbatch.toml
expect "" systemctl reload ringbatch-broker
expect "3 6 9 12" as_ringbatch infer affine 1 2 3 4
[ "$(main_pid)" = "$pid" ] && echo "ok    the same broker" || { echo "FAIL  the reload restarted the broker"; failed=1; }
expect "-> 9ms" as_ringbatch set affine wait_time=9ms --save
expect "9ms" grep 9ms /var/lib/ringbatch/ringbatch.toml.saved
if runuser -u ringbatch -- touch /etc/ringbatch/gateway.env 2>/dev/null; then
  echo "FAIL  the service writes what root's systemd reads"; failed=1
fi

# If a broker dies or hangs, systemd starts another.
kill -9 "$pid"
expect "" other_pid "$pid"
expect ready as_ringbatch ready affine echo --wait 30s
expect "3 6 9 12" as_ringbatch infer affine 1 2 3 4
pid=$(main_pid)
kill -STOP "$pid" # its watchdog is not answered
expect "" other_pid "$pid"
expect ready as_ringbatch ready affine echo --wait 30s

expect "" systemctl stop ringbatch-gateway ringbatch-worker@echo ringbatch-broker
for unit in ringbatch-broker ringbatch-gateway ringbatch-worker@echo; do expect success value Result $unit; done
expect "" nobody_left

# A web service in a virtual environment, as another user than the broker's.
if [ -x /srv/app/venv/bin/uvicorn ]; then
  cp /try/broker.conf /etc/systemd/system/ringbatch-broker.service.d/venv.conf
  systemctl daemon-reload
  expect "" systemctl start ringbatch-broker web
  body="[$(seq -s, 64)]"
  expect '"class":' curl -s -m 30 --json "$body" http://127.0.0.1:8000/classify
  expect "" systemctl reload web
  expect '"class":' curl -s -m 30 --json "$body" http://127.0.0.1:8000/classify
  expect "may not use this broker" sh -c "runuser -u web -- /srv/app/venv/bin/ringbatch scale classifier 3 2>&1 || true"
  expect "" systemctl stop web ringbatch-broker
  for unit in ringbatch-broker web; do expect success value Result $unit; done
fi
[ "$failed" = 0 ] || journalctl --no-pager -n 40 2>&1 | tail -40
systemctl exit $failed
