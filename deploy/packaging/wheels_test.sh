#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheels_test.sh [FOLDER]: installs the wheels of this machine into fresh environments
# of every CPython 3.9 to 3.14 at hand, and uses them there with nothing else on PATH.
# Without a folder the oldest and the newest build the package from a clone's files. PYTHONS names other versions.
set -euo pipefail
wheels=${1:+$(realpath "$1")}
cd "$(dirname "$0")"
version=$(cat ../../VERSION)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
unset PYTHONPATH RINGBATCH_LIBRARY RINGBATCH_BINARY RINGBATCH_SOCKET || true

# interpreter VERSION: its path, or nothing.
interpreter() {
	local found
	for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python3; do
		found=$(command -v "$found") && "$found" -c 'import venv' 2>/dev/null && echo "$found" && return
	done
	return 0
}

# install VENV ARGUMENTS…: by the pip of the environment.
install() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

# try VENV ABI: the smoke test with nothing but the environment on PATH.
try() { PATH=$1/bin "$1/bin/python" smoke.py "$version" "$2"; }

pythons=()
for python in ${PYTHONS:-3.9 3.10 3.11 3.12 3.13 3.14}; do
	if [ "$(interpreter "$python")" ]; then pythons+=("$python"); else echo "CPython $python: not at hand"; fi
done
[ ${#pythons[@]} -gt 0 ] || { echo "no CPython 3.9 to 3.14 found" >&2; exit 1; }
newest=${pythons[-1]}
if [ ! "$wheels" ]; then
	[ "${PYTHONS:-}" ] || mapfile -t pythons < <(printf '%s\n' "${pythons[0]}" "$newest" | uniq)
	mkdir "$tmp/clone"
	(cd ../.. && git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T -) | tar -x -C "$tmp/clone"
fi
for python in "${pythons[@]}"; do
	"$(interpreter "$python")" -m venv "$tmp/$python"
	if [ "$wheels" ]; then
		install "$tmp/$python" --only-binary :all: --find-links "$wheels" "ringbatch==$version"
	else
		install "$tmp/$python" "$tmp/clone/python"
	fi
	try "$tmp/$python" abi3
done

if [ ! "$wheels" ]; then
	old=$(interpreter 3.8)
	[ "$old" ] || { echo "CPython 3.8: not at hand"; exit; }
	"$old" -m venv "$tmp/old"
	said=$(install "$tmp/old" ../../python 2>&1) && { echo "CPython 3.8 installs the package" >&2; exit 1; }
	[[ $said == *"ringbatch needs Python 3.9"* ]] || { echo "CPython 3.8 is not told what is needed: $said" >&2; exit 1; }
	echo "CPython 3.8 is told that ringbatch needs 3.9"
	exit
fi

last=$tmp/$newest
install "$last" --no-deps --force-reinstall "$wheels"/ringbatch-"$version"-py3-none-*_"$(uname -m)".whl
try "$last" none

echo "the extras resolve"
for extra in torch onnx; do
	install "$last" --dry-run --find-links "$wheels" "ringbatch[$extra]==$version" ||
		{ echo "ringbatch[$extra] does not resolve" >&2; exit 1; }
done
echo "${#pythons[@]} versions of CPython passed"
