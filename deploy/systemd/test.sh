#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Boots a real systemd with these units, as root of a new namespace, and uses them as
# an operator does. Needs root, systemd and overlayfs. Nothing outside changes: the
# file system is an overlay over this machine's, with a new /tmp, /run and /dev.
#
#   deploy/systemd/test.sh [FOLDER]     the log stays in FOLDER/log
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ "$(id -u)" = 0 ] || { echo "needs root"; exit 1; }
systemd=$(ls /lib/systemd/systemd /usr/lib/systemd/systemd 2>/dev/null | head -1) || { echo "needs systemd"; exit 1; }

if [ "${1:-}" != inside ]; then
  folder=$(mkdir -p "${1:-$here/../../build/systemd}" && cd "${1:-$here/../../build/systemd}" && pwd)
  rm -rf "$folder/up" "$folder/work" "$folder/root"; mkdir -p "$folder"/{up,work,root}
  (cd "$here/../.." && go build -o "$folder/ringbatch" ./cmd/ringbatch)
  export RINGBATCH_VENV=${RINGBATCH_VENV:-$(cd "$here/../.." && pwd)/build/python-venv}
  [ -x "$RINGBATCH_VENV/bin/uvicorn" ] && [ -x "$RINGBATCH_VENV/bin/ringbatch" ] || {
    "$here/../../hack/venv.sh" "$RINGBATCH_VENV" "numpy>=1.22" fastapi uvicorn "setuptools>=77"
    "$RINGBATCH_VENV/bin/python" -m pip install --quiet --no-build-isolation --no-deps "$here/../../python"
  }
  code=0
  unshare --mount --pid --fork --kill-child --cgroup --uts --ipc --net "$0" inside "$folder" "$systemd" >"$folder/console" 2>&1 || code=$?
  cp "$folder/up/try/log" "$folder/log" 2>/dev/null || { tail -20 "$folder/console"; echo "systemd did not come up"; exit 1; }
  cat "$folder/log"
  rm -rf "$folder/up" "$folder/work" "$folder/root"
  [ "$code" = 0 ] && echo "systemd: all as it should be" || { echo "systemd: it ended with $code"; exit 1; }
  exit 0
fi

# The first process of the namespace: makes the root and becomes systemd.
folder=$2
root=$folder/root
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/up,workdir=$folder/work" "$root"
for place in tmp run dev; do mount -t tmpfs tmpfs "$root/$place"; done
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/sys/fs/cgroup" 2>/dev/null || true
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
  IFS=: read -r name major minor <<<"$node"
  mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts devpts -o newinstance,ptmxmode=666 "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"

rm -rf "$root/etc/systemd/system"; mkdir -p "$root/etc/systemd/system" "$root/etc/ringbatch" "$root/try"
install -m 755 "$folder/ringbatch" "$root/usr/bin/ringbatch"
cp "$here"/*.service "$root/etc/systemd/system/"
chroot "$root" useradd --system ringbatch 2>/dev/null || true
cat >"$root/etc/ringbatch/ringbatch.toml" <<END
[[model]]
name = "affine"
inputs = ["x:f32[4]"]
outputs = ["y:f32[4]"]
[[model.worker]]
command = ["/usr/bin/ringbatch", "worker", "affine", "--scale", "2", "--input", "x:f32[4]"]
END
echo 'GATEWAY_FLAGS="--grpc off --http 127.0.0.1:8000"' >"$root/etc/ringbatch/gateway.env"
echo 'WORKER_COMMAND="/usr/bin/ringbatch worker echo --wait 1m"' >"$root/etc/ringbatch/worker-echo.env"
chmod 755 "$root/etc/ringbatch"
# The unit's watchdog waits 30 s; the test waits less.
mkdir "$root/etc/systemd/system/ringbatch-broker.service.d"
printf '[Service]\nWatchdogSec=2\n' >"$root/etc/systemd/system/ringbatch-broker.service.d/try.conf"
install -m 755 "$here/try.sh" "$root/try/try.sh"
# The web service of deploy/web, in an environment of the system's Python, which all users may run.
venv=$RINGBATCH_VENV
lib=lib/$(/usr/bin/python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
if [ ! -d "$venv/$lib" ]; then
  echo "no web service: $venv is of another Python than the system's, which needs $lib" >&2
else
  chroot "$root" useradd --system web
  chroot "$root" /usr/bin/python3 -m venv --without-pip /srv/app/venv
  cp -r "$venv/$lib/site-packages" "$root/srv/app/venv/$lib"
  for command in ringbatch uvicorn; do
    sed '1s|.*|#!/srv/app/venv/bin/python|' "$venv/bin/$command" >"$root/srv/app/venv/bin/$command"
    chmod 755 "$root/srv/app/venv/bin/$command"
  done
  cp "$here"/../../examples/python/{numpy_worker,fastapi_app}.py "$here/../web/ringbatch.toml" "$root/srv/app"
  cp "$here/../web/web.service" "$root/etc/systemd/system"
  cp "$here/../web/broker.conf" "$root/try"
fi
cat >"$root/etc/systemd/system/try.service" <<END
[Unit]
DefaultDependencies=no
After=dbus.socket
[Service]
Type=oneshot
ExecStart=/try/try.sh
StandardOutput=file:/try/log
StandardError=inherit
TimeoutStartSec=300
END
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=try.service\n' >"$root/etc/systemd/system/try.target"
# Units of this machine's boot that the test does not want.
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-timesyncd.service systemd-networkd.service \
  systemd-resolved.service systemd-logind.service getty.target systemd-journal-flush.service; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
exec chroot "$root" env -i container=ringbatch PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  "$3" --system --unit=try.target --log-target=console --show-status=no
