#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# hack/again.sh COMMAND...: runs a command that downloads, and again if it fails. (pip
# retries a connection, but not a download that broke off.)
set -u
export PIP_DEFAULT_TIMEOUT=${PIP_DEFAULT_TIMEOUT:-60} # a network that stalls for a while
for pause in 5 20; do
  "$@" && exit
  echo "again.sh: $1 failed, again in $pause s" >&2
  sleep "$pause"
done
exec "$@"
