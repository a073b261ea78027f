#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages.sh FOLDER [ARCH…]: .deb and .rpm of the command (ringbatch) and of the C
# library (libringbatch-dev, ringbatch-devel), for amd64 and arm64, by nfpm; and the
# bare command. Needs build/release-venv. $PACKAGE_VERSION makes another version's,
# for tests of upgrades.
set -euo pipefail
mkdir -p "$1"
out=$(realpath "$1")
shift
[ $# -gt 0 ] || set -- amd64 arm64
cd "$(dirname "$0")/../.."
umask 022
venv=$PWD/build/release-venv
version=$(cat VERSION)
package_version=${PACKAGE_VERSION:-$version}
abi=$(sed -n 's/^#define RB_ABI_VERSION //p' cbindings/ringbatch.h)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

go_command() {
	CGO_ENABLED=0 GOFLAGS='' GOAMD64=v1 GOARCH=$1 go build -trimpath -buildvcs=false -ldflags='-s -w -buildid=' -o "$2" ./cmd/ringbatch
}

rm -rf build/packages
go_command "$(go env GOHOSTARCH)" build/packages/host/ringbatch

for arch in "$@"; do
	machine=$([ "$arch" = amd64 ] && echo x86_64 || echo aarch64)
	for format in deb rpm; do
		stage=build/packages/$arch-$format
		mkdir -p "$stage"
		if [ "$arch" = "$(go env GOHOSTARCH)" ]; then
			cp build/packages/host/ringbatch "$stage/"
		else
			go_command "$arch" "$stage/ringbatch"
		fi
		if [ $format = deb ]; then
			printf 'Copyright: 2026 the ringbatch authors, %s\nLicense: Apache-2.0, see /usr/share/common-licenses/Apache-2.0\n' \
				https://github.com/ringbatch/ringbatch >"$stage/copyright"
			maintainer=$(sed -n 's/^maintainer: //p' deploy/packaging/nfpm.yaml)
			printf 'ringbatch (%s-1) unstable; urgency=medium\n\n  * See %s\n\n -- %s  %s\n' "$package_version" \
				https://github.com/ringbatch/ringbatch/blob/main/CHANGELOG.md "$maintainer" \
				"$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$stage/changelog.gz"
			doc='' somode=0644 changelog=changelog.Debian.gz
			libdir=/usr/lib/$machine-linux-gnu libc='"libc6 (>= 2.17)"' dev=libringbatch-dev
		else
			cp LICENSE "$stage/copyright"
			gzip -9nc CHANGELOG.md >"$stage/changelog.gz"
			doc=doc somode=0755 changelog=CHANGELOG.md.gz
			libdir=/usr/lib64 libc='"glibc >= 2.17"' dev=ringbatch-devel
		fi
		make -s -C cbindings BUILD="$PWD/$stage/c" CFLAGS="-O2 -g0 -ffile-prefix-map=$PWD=." LDFLAGS="-s -Wl,--build-id=none" \
			CC="$venv/bin/python -m ziglang cc -target $machine-linux-gnu.2.17" AR="$venv/bin/python -m ziglang ar" \
			PREFIX=/usr LIBDIR=$libdir DESTDIR="$PWD/$stage/root" install >/dev/null
		for package in ringbatch $dev; do
			template=deploy/packaging/nfpm$([ $package = ringbatch ] || echo -dev).yaml
			license=/usr/share/$([ $format = deb ] && echo "doc/$package/copyright" || echo "licenses/$package/LICENSE")
			date=$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)
			sed -e "s|@ARCH@|$arch|; s|@VERSION@|$package_version|; s|@DATE@|$date|; s|@STAGE@|$stage|g" \
				-e "s|@LICENSE@|$license|; s|@LIBDIR@|$libdir|g; s|@ABI@|$abi|g; s|@LIBC@|$libc|; s|@DEV@|$dev|g" \
				-e "s|@DOC@|$doc|; s|@SOMODE@|$somode|; s|@CHANGELOG@|$changelog|" "$template" >"$stage/$package.yaml"
			"$venv/bin/nfpm" package --config "$stage/$package.yaml" --packager $format --target "$out" >"$stage/nfpm.log" 2>&1 || {
				cat "$stage/nfpm.log" >&2
				exit 1
			}
		done
	done
	install -m 755 "build/packages/$arch-deb/ringbatch" "$out/ringbatch-$version-linux-$arch"
done
