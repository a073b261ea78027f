#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dpkg says purge when nothing is to be left; rpm has no such word, and keeps what
# the administrator wrote.
set -e
case "${1:-}" in
purge)
	rm -rf /run/ringbatch /var/lib/ringbatch /etc/ringbatch
	if getent passwd ringbatch >/dev/null; then
		userdel ringbatch
	fi
	;;
remove | 0)
	rm -rf /run/ringbatch
	;;
esac
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
