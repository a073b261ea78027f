#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# arm64 on an x86-64 machine: cross-compiled, and run under qemu's user emulation. The conformance scripts with broker, Go
# and C peers of arm64, an end-to-end test in Go, and the Python package's smoke test in Debian's CPython for arm64.
# qemu keeps x86's memory order: test/model checks weaker ones.
#
#   check.sh [PART…]       go, c or python; without one all three
set -euo pipefail
cd "$(dirname "$0")/../.."
missing=()
for need in aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu qemu-aarch64-static:qemu-user-static; do
	command -v "${need%:*}" >/dev/null || missing+=("${need#*:}")
done
[ -e /usr/aarch64-linux-gnu/include/stdio.h ] || missing+=(libc6-dev-arm64-cross)
[ ${#missing[@]} = 0 ] || { echo "arm64: install these Debian packages first: ${missing[*]}" >&2; exit 1; }
work=$PWD/build/arm64
mkdir -p "$work"
rm -f "$work"/*.test "$work/driver" # scripts, of a run before
export GOARCH=arm64 CGO_ENABLED=0

# emulate PROGRAM ROOT: puts a script in its place, which runs it with the libraries of ROOT. So programs start one another.
emulate() {
	mv "$1" "$1.arm64"
	printf '#!/bin/sh\nexec qemu-aarch64-static -L %q -0 %q %q "$@"\n' "$2" "$1" "$1.arm64" >"$1"
	chmod +x "$1" "$1.arm64"
}

part_go() {
	go test -c -vet=off -o "$work/e2e.test" ./test/e2e
	emulate "$work/e2e.test" /
	(cd test/e2e && RINGBATCH_TEST_SELF=$work/e2e.test "$work/e2e.test" -test.v -test.short \
		-test.run 'SIGTERM|ClientKilled|AllStages|SeveralBatches')
}

part_c() {
	go test -c -vet=off -o "$work/conformance.test" ./test/conformance
	emulate "$work/conformance.test" /
	aarch64-linux-gnu-gcc -std=gnu11 -D_GNU_SOURCE -O2 -DRB_LINK_MASK=3 -Icbindings -pthread -o "$work/driver" \
		test/conformance/testdata/driver.c cbindings/src/*.c -ldl
	emulate "$work/driver" /usr/aarch64-linux-gnu
	(cd test/conformance && RINGBATCH_C_DRIVER=$work/driver "$work/conformance.test" -test.v -test.parallel 4 -test.run Both)
}

# python_root: Debian's CPython and NumPy for arm64, unpacked; this machine's package database stays as it is.
python_root() {
	local apt=$work/apt deb
	mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
	: >"$apt/status"
	private() {
		apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Install-Recommends=false -o Debug::NoLocking=1 \
			-o Dir::State="$apt/state" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" "$@"
	}
	private update && private install -y --download-only python3-numpy || return
	for deb in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
	emulate "$(realpath "$work/root/usr/bin/python3")" "$work/root"
	for deb in blas lapack; do ln -sf $deb/lib$deb.so.3 "$work/root/usr/lib/aarch64-linux-gnu/"; done
}

part_python() {
	local root=$work/root packages=$work/root/usr/lib/python3/dist-packages python
	[ -e "$packages/numpy" ] || python_root || { echo "arm64: Python skipped: Debian's packages for arm64 cannot be had here"; return; }
	python=$(realpath "$root/usr/bin/python3")
	[ -e "$work/venv/bin/python" ] || hack/venv.sh "$work/venv" setuptools==83.0.0
	(cd python && CC=aarch64-linux-gnu-gcc RINGBATCH_WHEEL_PLATFORM=linux_aarch64 RINGBATCH_WHEEL_ABI=abi3 "$work/venv/bin/python" setup.py \
		--quiet build --build-base "$work/build" egg_info --egg-base "$work" bdist_wheel --bdist-dir "$work/wheel" --dist-dir "$work/dist" >"$work/wheel.log" 2>&1) || { cat "$work/wheel.log" >&2; return 1; }
	rm -rf "$packages"/ringbatch*
	python3 -m zipfile -e "$work"/dist/ringbatch-*-linux_aarch64.whl "$packages"
	emulate "$packages/ringbatch/_native/ringbatch" /
	printf '#!%s\nimport sys\nfrom ringbatch.__main__ import main\nsys.exit(main())\n' "$python" >"$root/usr/bin/ringbatch"
	chmod +x "$root/usr/bin/ringbatch"
	mkdir -p "$work/path" && ln -sf "$(command -v qemu-aarch64-static)" "$work/path/" # without compilers
	PYTHONHOME=$root/usr PATH=$work/path:$root/usr/bin "$python" deploy/packaging/smoke.py "$(cat VERSION)" abi3
}

for part in "${@:-go c python}"; do
	for one in $part; do
		echo "arm64: $one"
		"part_$one"
	done
done
echo "arm64: passed under $(qemu-aarch64-static --version | head -1)"
