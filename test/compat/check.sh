#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two versions in one ring: the conformance scripts with this tree's broker and an earlier commit's clients and workers, in
# Go and C, then the other way round. The file `commit` names the commit: the first with the present layout version.
# Its peers play all of its scripts; this tree's peers play the scripts that both have, word for word.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=$(grep -v '^#' test/compat/commit)
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
	echo "compat: skipped: this clone has no commit $commit (fetch the whole history)"
	exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree" "$work/before" "$work/now"
git archive "$commit" | tar -x -C "$work/tree"

layout() { sed -n 's/.*LAYOUT_VERSION 0x\([0-9a-f]*\)ull/\1/p' "$1/cbindings/src/layout_gen.h"; }
if [ "$(layout .)" != "$(layout "$work/tree")" ]; then
	echo "compat: skipped: the layout version has changed since $commit: write this commit's hash into test/compat/commit"
	exit 0
fi

# build TREE DIR: the conformance test, which plays Go's peers too, and the C driver.
build() {
	(cd "$1" && go test -c -vet=off -o "$2/peers" ./test/conformance)
	cc -std=gnu11 -D_GNU_SOURCE -O1 -DRB_LINK_MASK=3 -I"$1/cbindings" -pthread -o "$2/c-driver" \
		"$1/test/conformance/testdata/driver.c" "$1"/cbindings/src/*.c -ldl
}
build "$work/tree" "$work/before"
build "$PWD" "$work/now"

# play BROKER PEERS FOLDER: the first two are before or now, FOLDER has testdata.
play() {
	echo "compat: the broker of $1, clients and workers of $2, $(find "$3/testdata" -name '*.txt' | wc -l) scripts"
	(cd "$3" && RINGBATCH_GO_DRIVER=$work/$2/peers RINGBATCH_C_DRIVER=$work/$2/c-driver "$work/$1/peers" -test.run Alike)
}
mkdir -p "$work/both/testdata"
for script in test/conformance/testdata/*.txt; do
	if cmp -s "$script" "$work/tree/$script"; then cp "$script" "$work/both/testdata/"; fi
done
play now before "$work/tree/test/conformance"
play before now "$work/both"
echo "compat: this tree and $commit serve each other"
