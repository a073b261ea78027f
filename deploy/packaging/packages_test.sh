#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages_test.sh: builds the packages of this machine twice, as two versions. In a fresh
# Debian (debootstrap, in build/) it installs the first, starts the broker as the unit says,
# upgrades to the second under load, removes and purges. Then it installs the .rpm with
# rpm's own tools. Root only; changes nothing outside build/ (or $PACKAGES_TEST_FOLDER).
# Needs debootstrap, rpm and the wheels in dist/ (make wheels).
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${RINGBATCH_PRIVATE_MOUNTS:-}" ] || RINGBATCH_PRIVATE_MOUNTS=1 exec unshare --mount --propagation private "$0" "$@"
work=${PACKAGES_TEST_FOLDER:-$PWD/build/packages-test}
arch=$(dpkg --print-architecture)
version=$(cat VERSION)
next=$version+next
rm -rf "$work/root" "$work/rpm" "$work/first" "$work/next"
mkdir -p "$work"
broker='' load=''
trap 'kill $broker $load 2>/dev/null || true; wait; umount "$work/root/proc" 2>/dev/null || true' EXIT
step() { printf '\n== %s\n' "$*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }

step "packages of $version and $next"
deploy/packaging/packages.sh "$work/first" "$arch"
PACKAGE_VERSION=$next deploy/packaging/packages.sh "$work/next" "$arch"
deb() { echo "$work/$1"/"$2"_*_"$arch".deb; }
cmp "$work/first/ringbatch-$version-linux-$arch" "$work/next/ringbatch-$version-linux-$arch" # the same bytes, twice

step "a Debian of its own"
base=$work/base.tar
if ! [ -f "$base" ]; then
	rm -rf "$work/root"
	debootstrap --variant=minbase --include=gcc,libc6-dev,pkg-config "${SUITE:-bookworm}" "$work/root" >"$work/debootstrap.log"
	tar -C "$work/root" -cf "$base" .
	rm -rf "$work/root"
fi
mkdir -p "$work/root" && tar -C "$work/root" -xf "$base"
root=$work/root
mount -t proc proc "$root/proc"
in_root() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"; }
install_debs() {
	cp "$@" "$root/tmp/"
	in_root dpkg --force-confold -i $(for f in "$@"; do echo "/tmp/$(basename "$f")"; done) >"$work/dpkg.log" 2>&1 ||
		{ cat "$work/dpkg.log"; fail "dpkg -i $*"; }
}
everything() { (
	cd "$root"
	find . -xdev \( -path ./proc -o -path ./tmp -o -path ./var/log -o -path ./var/cache -o -path './etc/*-' \) -prune -o -print | sort
	cut -d: -f1 etc/passwd etc/group
); }
everything >"$work/before"

step "install"
install_debs "$(deb first ringbatch)" "$(deb first libringbatch-dev)"
in_root ringbatch version
[ "$(in_root stat -c '%U %a' /run/ringbatch)" = "ringbatch 700" ] || fail "/run/ringbatch"
[ "$(in_root stat -c '%U %G %a' /etc/ringbatch)" = "root root 755" ] || fail "/etc/ringbatch is not root's alone to write"
printf '#include <%s>\n' ringbatch.h string.h >"$root/tmp/v.c"
echo 'int main(int argc, char **argv) { return argc == 2 ? strcmp(rb_version(), argv[1]) : 2; }' >>"$root/tmp/v.c"
in_root sh -c "cc -o /tmp/v /tmp/v.c \$(pkg-config --cflags --libs ringbatch) && /tmp/v $version" ||
	fail "a C program built with pkg-config"
[ "$(in_root pkg-config --modversion ringbatch)" = "$version" ] || fail "pkg-config --modversion"

step "start, as the unit says"
printf '[[worker]]\ncommand = ["ringbatch", "worker", "echo"]\n' >>"$root/etc/ringbatch/ringbatch.toml"
exec_start=$(sed -n 's/^ExecStart=//p' "$root/usr/lib/systemd/system/ringbatch-broker.service")
uid=$(in_root id -u ringbatch)
# start_broker FLAGS…: runs the unit's command as the unit's user, without systemd.
start_broker() {
	# shellcheck disable=SC2086 # the unit's words
	chroot --userspec=ringbatch:ringbatch "$root" \
		/usr/bin/env -i PATH=/usr/bin:/bin STATE_DIRECTORY=/var/lib/ringbatch $exec_start "$@" 2>>"$work/broker.log" &
	broker=$!
}
is_ready() {
	in_root setpriv --reuid "$uid" --clear-groups --regid "$uid" ringbatch ready --socket /run/ringbatch/broker.sock echo >/dev/null 2>&1
}
ready() {
	for _ in $(seq 600); do is_ready && return; sleep 0.1; done
	cat "$work/broker.log"
	fail "the broker is not ready"
}
: >"$work/broker.log"
start_broker
ready

step "upgrade under load"
python3 -m venv --clear "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: --find-links dist "ringbatch==$version"
chmod 755 "$work" # the callers are of another user
socket=$root/run/ringbatch/broker.sock
if [ ${#socket} -gt 100 ]; then mount --bind "$root/run/ringbatch" /mnt && socket=/mnt/broker.sock; fi # the longest path of a socket is 107
"$work/venv/bin/python" deploy/packaging/load.py "$socket" "$uid" >"$work/load.log" 2>&1 &
load=$!
until grep -q "answers come" "$work/load.log"; do kill -0 $load || { cat "$work/load.log"; fail "the load ended"; }; sleep 0.1; done
install_debs "$(deb next ringbatch)" "$(deb next libringbatch-dev)"
[ "$(in_root dpkg-query -W -f '${Version}' ringbatch)" = "$next-1" ] || fail "the version after the upgrade"
grep -q '^\[\[worker\]\]' "$root/etc/ringbatch/ringbatch.toml" || fail "the configuration was overwritten"
old=$broker
start_broker --take-over # no gap: the old broker finishes its requests
wait $old || fail "the old broker ended with $?"
ready
old=$broker
kill $old && wait $old || fail "the broker ended with $?" # what systemctl try-restart does
start_broker
ready
kill $load
wait $load || { cat "$work/load.log"; fail "requests were lost"; }
load=''
tail -1 "$work/load.log"
kill $broker && wait $broker || fail "the broker ended with $?"
broker=''
umount /mnt 2>/dev/null || true

step "remove and purge"
in_root dpkg -r ringbatch libringbatch-dev >/dev/null
in_root test ! -e /usr/bin/ringbatch -a -e /etc/ringbatch/ringbatch.toml || fail "after dpkg -r"
in_root dpkg -P ringbatch libringbatch-dev >/dev/null
everything >"$work/after"
diff "$work/before" "$work/after" || fail "purge left something, or took something away"

step "rpm"
rpms=("$work"/first/*.rpm)
for rpm in "${rpms[@]}"; do
	rpm -qp --nosignature --qf '%{NAME} %{VERSION} %{ARCH} %{LICENSE}\n' "$rpm"
	rpm -K --nosignature "$rpm"
done
# Not grep -q, which would close the pipe of rpm.
rpm -qpl --nosignature "${rpms[@]}" | grep -x /usr/lib/systemd/system/ringbatch-broker.service >/dev/null || fail "no unit in the rpm"
mkdir -p "$work/rpm"
rpm --root "$work/rpm" --initdb
rpm --root "$work/rpm" --nosignature --nodeps --noscripts --ignorearch -i "${rpms[@]}"
"$work/rpm/usr/bin/ringbatch" version
rpm --root "$work/rpm" --nodeps -V ringbatch ringbatch-devel || fail "rpm -V"
rpm --root "$work/rpm" --nodeps --noscripts -e ringbatch ringbatch-devel
[ ! -e "$work/rpm/usr/bin/ringbatch" ] || fail "rpm -e left the command"

echo
echo "the packages install, start, upgrade under load, and leave nothing behind"
