#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# reproducible.sh: builds the release of this commit once more, in a clone in another
# folder, and compares every byte with dist/ (make release first).
set -euo pipefail
cd "$(dirname "$0")/../.."
again=$PWD/build/another-folder/of-another-name
rm -rf "$again"
git clone --quiet --no-hardlinks . "$again"
mkdir -p "$again/build"
ln -s "$PWD/build/release-venv" "$again/build/release-venv"
"$again/deploy/packaging/release.sh" >"$PWD/build/reproducible.log" 2>&1 || { tail -40 "$PWD/build/reproducible.log" >&2; exit 1; }
diff dist/SHA256SUMS "$again/dist/SHA256SUMS"
echo "$(wc -l <dist/SHA256SUMS) files, the same bytes from two folders"
