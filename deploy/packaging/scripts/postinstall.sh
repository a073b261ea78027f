#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the user and the folders. The broker is not started: it has no models yet. An
# upgrade restarts running units; clients with retry see a pause.
set -e
if ! getent passwd ringbatch >/dev/null; then
	if command -v systemd-sysusers >/dev/null; then
		systemd-sysusers ringbatch.conf
	else # a container without systemd
		useradd --system --user-group --home-dir /var/lib/ringbatch --no-create-home --shell /usr/sbin/nologin ringbatch
	fi
fi
if command -v systemd-tmpfiles >/dev/null; then
	systemd-tmpfiles --create ringbatch.conf
else
	install -d -m 0700 -o ringbatch -g ringbatch /run/ringbatch
	install -d -m 0755 -o ringbatch -g ringbatch /var/lib/ringbatch
	chown root:root /etc/ringbatch && chmod 0755 /etc/ringbatch
fi
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	systemctl try-restart ringbatch-broker.service ringbatch-gateway.service || true
fi
