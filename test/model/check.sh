#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the model: the real protocol must hold in every run, and every mutant
# must be caught. Needs spin and tcc. The result depends on these files alone: `checked` has their
# sum after a good run, and make check compares it.
#
#   check.sh          two minutes on 2 cores
#   check.sh full     the larger runs too; wants 6 GB of memory
set -euo pipefail
cd "$(dirname "$0")"
models=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export models work

# one NAME EXPECTED FLAGS…: explores all states; EXPECTED is holds or caught.
# Names that begin with waiting- or weights- are of those models, the others of slots.pml.
one() {
    local name=$1 expected=$2 dir=$work/$1 model=$models/slots.pml
    shift 2
    case $name in waiting-*) model=$models/waiting.pml ;; weights-*) model=$models/weights.pml ;; esac
    mkdir -p "$dir" && cd "$dir"
    spin -a "$@" "$model" >/dev/null
    tcc -DSAFETY -DNOFAIR -DVECTORSZ=2048 -o pan pan.c
    ./pan -m200000 -w23 >out
    local found=holds
    if grep -q 'errors: [1-9]' out; then found=caught; fi
    if grep -q 'max search depth too small\|out of memory' out; then found=cut-short; fi
    printf '%-7s %-28s %s states%s\n' "$found" "$name" "$(awk '/states, stored/ {print $1}' out)" \
        "$(awk '/^pan:1:/ {sub("pan:1:", ";"); print; exit}' out)"
    [ "$found" = "$expected" ]
}
export -f one

runs() {
    echo "no-faults holds -DREQUESTS0=1 -DREQUESTS1=1"
    echo "reuse-and-expiry holds -DREQUESTS0=0 -DREQUESTS1=2 -DEXPIRIES=1"
    echo "reuse-and-cancel holds -DREQUESTS0=0 -DREQUESTS1=2 -DCANCELS=1"
    echo "reuse-and-client-death holds -DREQUESTS0=0 -DREQUESTS1=2 -DCLIENT_DEATHS=1"
    echo "reuse-and-worker-death holds -DREQUESTS0=0 -DREQUESTS1=2 -DWORKER_DEATHS=1"
    echo "failure-and-death holds -DREQUESTS0=0 -DREQUESTS1=1 -DFAILURES=1 -DWORKER_DEATHS=1"
    echo "no-ring-after-failure caught -DNO_RING_AFTER_FAILURE -DREQUESTS0=0 -DFAILURES=1"
    echo "no-generation-check caught -DNO_GENERATION -DEXPIRIES=1"
    echo "done-without-generation caught -DNO_GENERATION_DONE -DREQUESTS1=2"
    echo "one-bell-for-two-waiters caught -DONE_BELL"
    echo "recycle-before-death caught -DRECYCLE_EARLY -DLEASES=1"
    echo "arm-swapped caught -DARM_SWAPPED -DREQUESTS0=2 -DREQUESTS1=0"
    echo "park-swapped caught -DPARK_SWAPPED"
    echo "bell-read-after-the-words caught -DSEEN_LATE"
    echo "no-ring-after-death caught -DNO_RING_AFTER_DEATH -DREQUESTS0=0 -DWORKER_DEATHS=1"
    echo "expire-without-held caught -DNO_HELD -DREQUESTS0=0 -DREQUESTS1=2 -DEXPIRIES=1"
    echo "state-in-place caught -DSTATE_IN_PLACE -DREQUESTS0=0 -DREQUESTS1=2 -DWORKER_DEATHS=1"
    echo "flip-always caught -DFLIP_ALWAYS -DREQUESTS0=0 -DREQUESTS1=2 -DEXPIRIES=1"
    echo "flip-after-giving-up caught -DFLIP_GIVEN_UP -DREQUESTS0=0 -DREQUESTS1=2 -DCANCELS=1"
    echo "successor-not-fresh caught -DNO_FRESH -DREQUESTS0=0 -DREQUESTS1=2 -DCLIENT_DEATHS=1"
    echo "waiting-two-threads holds -DTHREADS=2 -DREQUESTS=2"
    echo "waiting-timeouts holds -DTHREADS=2 -DREQUESTS=1 -DTIMEOUTS=1"
    echo "weights-versions holds -DPUBLISHES=7"
    echo "weights-publishers-die holds -DPUBLISHES=5 -DDEATHS=1"
    echo "weights-refused holds -DPUBLISHES=5 -DREFUSALS=2"
    echo "weights-refused-and-death holds -DPUBLISHES=4 -DREFUSALS=1 -DDEATHS=1"
    echo "weights-good-first caught -DGOOD_FIRST -DPUBLISHES=4 -DREFUSALS=1 -DDEATHS=1"
    echo "weights-in-use-ignored caught -DIGNORE_IN_USE -DPUBLISHES=6"
    echo "weights-no-second-look caught -DNO_SECOND_LOOK -DPUBLISHES=6"
    echo "weights-announced-early caught -DANNOUNCE_EARLY"
    echo "waiting-without-promotion caught -DNO_PROMOTE -DTHREADS=3"
    echo "waiting-bell-after-the-words caught -DSEEN_LATE"
    [ "${1:-}" = full ] || return 0
    echo "two-worker-deaths holds -DREQUESTS0=0 -DREQUESTS1=1 -DWORKER_DEATHS=2"
    echo "two-failed-batches holds -DREQUESTS0=0 -DREQUESTS1=2 -DFAILURES=2"
    echo "waiting-three-threads holds -DTHREADS=3 -DREQUESTS=1"
    echo "weights-two-followers holds -DPUBLISHES=3 -DFOLLOWERS=2"
    echo "weights-two-deaths holds -DPUBLISHES=6 -DDEATHS=2"
    echo "failure-and-expiry holds -DREQUESTS0=0 -DREQUESTS1=2 -DFAILURES=1 -DEXPIRIES=1"
    echo "three-slots holds -DREQUESTS0=2 -DREQUESTS1=1"
    echo "worker-death holds -DREQUESTS0=1 -DREQUESTS1=1 -DWORKER_DEATHS=1"
    echo "client-death holds -DREQUESTS0=1 -DREQUESTS1=1 -DCLIENT_DEATHS=1"
    echo "lease holds -DREQUESTS0=1 -DREQUESTS1=1 -DLEASES=1"
    echo "cancel holds -DREQUESTS0=1 -DREQUESTS1=1 -DCANCELS=1"
    echo "failure holds -DREQUESTS0=1 -DREQUESTS1=1 -DFAILURES=2"
    echo "expiry holds -DREQUESTS0=1 -DREQUESTS1=1 -DEXPIRIES=1"
}

if ! runs "${1:-}" | xargs -P "${JOBS:-2}" -I{} bash -euo pipefail -c 'one {}'; then
    echo "model: a run did not end as expected" >&2
    exit 1
fi
cat "$models"/*.pml "$models"/check.sh | sha256sum >"$models"/checked
echo "model: all runs ended as expected"
