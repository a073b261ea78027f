#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dpkg passes "purge" to remove everything. rpm has no purge and keeps the administrator's files.
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
