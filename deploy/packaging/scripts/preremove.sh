#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dpkg passes "remove" and rpm passes 0 when the last version goes. An upgrade stops nothing.
set -e
case "${1:-}" in
remove | 0)
	if [ -d /run/systemd/system ]; then
		systemctl disable --now ringbatch-gateway.service ringbatch-broker.service || true
	fi
	;;
esac
