#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# release.sh: everything that people download, into dist/: wheels, packages, the bare
# command, the sources, a bill of materials, the changes, and checksums of all files.
# The same commit gives the same bytes, with the same Go, Python and deploy/packaging/requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(cat VERSION)
python=$PWD/build/release-venv/bin/python
[ -z "$(git status --porcelain)" ] || [ -n "${ALLOW_CHANGES:-}" ] || {
	echo "commit first: a release is made of a commit (ALLOW_CHANGES=1 takes the working tree)" >&2
	exit 1
}
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf dist
mkdir dist
"$python" deploy/packaging/wheels.py dist
deploy/packaging/packages.sh dist
git archive --prefix="ringbatch-$version/" HEAD | gzip -9n >"dist/ringbatch-$version.tar.gz"
"$python" deploy/packaging/sbom.py "dist/ringbatch-$version-linux-$(go env GOHOSTARCH)" >"dist/ringbatch-$version.cdx.json"
awk '/^## / { if (seen++) exit } seen' CHANGELOG.md >"dist/CHANGES-$version.md"
grep -q "$version" "dist/CHANGES-$version.md" || { echo "CHANGELOG.md does not begin with $version" >&2; exit 1; }
"$python" -m twine check --strict dist/*.whl
"$python" -m check_wheel_contents dist/*.whl
(cd dist && sha256sum -- * >SHA256SUMS)
echo "dist/ has ringbatch $version of $(git rev-parse --short HEAD):"
ls -l dist
