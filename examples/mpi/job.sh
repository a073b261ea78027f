#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A job on one node: a broker with two workers of the surrogate, and ranks. Broker, workers and socket end with the job.
#
#   sbatch job.sh ./cells 200            or, without Slurm: RANKS=8 ./job.sh ./cells 200
#   MPIRUN="mpirun --oversubscribe" RANKS=8 ./job.sh ./cells 200      Open MPI, more ranks than cores
#
#SBATCH --nodes=1
#SBATCH --ntasks=8
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
set -euo pipefail
weights=$(realpath -e "${WEIGHTS:-net.npz}")
# A folder of this job on the node's own disk: jobs of one user do not meet, and the path is short enough for a socket.
folder=$(mktemp -d "${TMPDIR:-/tmp}/rb.XXXXXX")
export RINGBATCH_SOCKET=$folder/b.sock
cat >"$folder/ringbatch.toml" <<END
[[model]]
name = "mlp"
inputs = ["x:f32[2]"]
outputs = ["y:f32[2]"]
max_batch_size = 512                # the cells of 8 ranks

[[model.worker]]
command = ["ringbatch", "worker", "mlp", "--weights", "$weights"]
instances = ${WORKERS:-2}           # of one thread each: leave the ranks their cores
END
ringbatch broker --config "$folder/ringbatch.toml" --log-level warn &
broker=$!
trap 'kill $broker 2>/dev/null && wait $broker || true; rm -rf "$folder"' EXIT # SIGTERM, as scancel sends it, ends here, too
trap 'exit 143' TERM INT
ringbatch ready mlp --wait 1m --quiet
if [ -n "${SLURM_JOB_ID:-}" ]; then
	srun "$@" &
else
	${MPIRUN:-mpirun} -n "${RANKS:-8}" "$@" &
fi
wait $! # a shell that waits takes signals at once
