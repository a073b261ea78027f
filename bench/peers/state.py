# SPDX-License-Identifier: Apache-2.0
"""Steps of a recurrent model, GRU-64 in NumPy: sequences of ringbatch, clients that carry their state, and Triton's sequences.

    python3 bench/peers/state.py [--clients 32] [--rounds 3] [--seconds 2] [--json FILE]

Triton runs its Python backend behind the `oldest` sequence batcher, without a wait and with 2 ms; the better one counts.
Installation, turns and clients are those of run.py. Each client compares its first answers with the same net in its own
process. All answers have the number of the step, so that a lost or doubled step ends the run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import gru
import report
import run
from peers import HERE, RINGBATCH, TRITON, Command, Peer, Running, ringbatch_broker, socket_of, triton_server

CONFIG = f"""backend: "python"
max_batch_size: 32
input [{{ name: "x" data_type: TYPE_FP32 dims: [{gru.UNITS}] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [{gru.ANSWER}] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
sequence_batching {{
  max_sequence_idle_microseconds: 60000000
  control_input [
    {{ name: "START" control [{{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }}] }},
    {{ name: "CORRID" control [{{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }}] }}
  ]
  oldest {{ max_candidate_sequences: 256 max_queue_delay_microseconds: WAIT }}
}}
"""


def triton(r: Running) -> list[Command]:
    folder = r.folder / "models" / "gru"
    (folder / "1").mkdir(parents=True)
    shutil.copy(HERE / "servers" / "triton_gru.py", folder / "1" / "model.py")
    shutil.copy(HERE / "gru.py", folder / "1")
    (folder / "config.pbtxt").write_text(CONFIG.replace("WAIT", str(1000 * r.wait_ms)))
    return triton_server(r)


def ours(how: str):
    def start(r: Running) -> list[Command]:
        broker = ringbatch_broker(r)
        return [broker, Command([r.python(), str(HERE / "servers" / "ringbatch_gru.py"), how], broker.environment)]

    return start


PEERS = [
    Peer("ringbatch", "ringbatch, a sequence", RINGBATCH, ["ringbatch", "numpy"], "gru", ours("sequence"), socket_of, (-1,), local=True),
    Peer("carried", "ringbatch, the client carries its state", RINGBATCH, ["ringbatch"], "gru_carried", ours("carried"), socket_of, (-1,),
        "ringbatch", True),
    Peer("triton", "Triton, gRPC, `oldest` sequence batcher", *TRITON, "gru_triton", triton),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    run.SIZES, run.CLIENTS = [4 * gru.UNITS], [a.clients]
    results = run.run(a, PEERS)
    print("\n" + report.table(results))
    if a.json:
        Path(a.json).write_text(json.dumps(results, indent=1) + "\n")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
