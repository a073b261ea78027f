#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the library's own code for shared memory under GenMC, which explores every
# execution that a memory model weaker than x86's allows: C11 as repaired (RC11),
# and IMM, which is weaker than ARMv8 and POWER. Each program must hold in both,
# and each mutant must be caught.
#
#   check.sh       wants genmc (https://github.com/MPI-SWS/genmc, 0.10 or later) on the PATH
set -euo pipefail
cd "$(dirname "$0")"
command -v genmc >/dev/null ||
	{ echo "weak: genmc is not on the PATH: build https://github.com/MPI-SWS/genmc (needs LLVM), or set PATH" >&2; exit 1; }
out=$(mktemp)
trap 'rm -f "$out"' EXIT
bad=0

# one PROGRAM EXPECTED [MUTANT [MODELS]]: EXPECTED is holds or caught.
one() {
	local program=$1 expected=$2 mutant=${3:-} models=${4:-rc11 imm}
	for model in $models; do
		local found=holds
		timeout 300 genmc --$model --disable-estimation -- -std=gnu11 -w -I../../../cbindings/src ${mutant:+-D$mutant} \
			"$program.c" >"$out" 2>&1 || found=caught
		grep -qE 'Number of complete executions explored|detected' "$out" || found=broken
		printf '%-7s %-11s %-5s %-13s %s\n' "$found" "$program" "$model" "$mutant" \
			"$(grep -oE 'complete executions explored: [0-9]+|Error: .*|.*(race|violation).*' "$out" | head -1)"
		[ "$found" = "$expected" ] || { bad=1; tail -30 "$out" >&2; }
	done
}

one entry holds
one arm holds
one park holds
one completion holds
one entry caught RELAXED_TAIL   # the tail is published before what it stands for
one entry caught RELAXED_HEAD rc11 # an entry is overwritten while it is read; no CPU stores before the branch that allows it
one arm caught RELEASE_TAIL     # a store and a later load change places: nobody rings
one park caught RELAXED_MAIL    # a mail is read before it is there
one park caught PARK_RELEASE    # parked and tail change places: nobody wakes
one completion caught RELAXED_END # the word is there before the output
one completion caught SEEN_LATE # the bell is read after the word
[ $bad = 0 ] && echo "weak: all programs ended as expected"
exit $bad
