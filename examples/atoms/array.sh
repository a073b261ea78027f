#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A Slurm array of ASE scripts: the tasks on a node share one potential. The command gets the task's number as its last argument.
#
#   SERVE="python examples/atoms/mace_models.py FILE" sbatch --array=0-99%16 examples/atoms/array.sh python mine.py
#
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
set -euo pipefail
folder=/tmp/ringbatch-$UID-$SLURM_ARRAY_JOB_ID # of this array on this node: $TMPDIR may be a task's own
mkdir -p -m 700 "$folder"
[ -O "$folder" ] && [ ! -L "$folder" ] || { echo "$folder is another user's" >&2; exit 1; }
export RINGBATCH_SOCKET=$folder/b.sock OMP_NUM_THREADS=1
# One task serves: the one that has the lock. When it ends, broker and workers end with it, and the next one serves.
flock --no-fork "$folder/lock" ${SERVE:-python examples/atoms/tiny.py} &
server=$!
trap 'kill $server 2>/dev/null && wait $server || true' EXIT # SIGTERM, as scancel and the time limit send it, ends here, too
"$@" "$SLURM_ARRAY_TASK_ID" &
task=$!
trap 'kill $task 2>/dev/null; wait $task; exit 143' TERM INT
wait $task # a shell that waits takes signals at once
