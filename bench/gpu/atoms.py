#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""32 ASE processes that share a MACE model on a GPU, beside 16 with a copy each, and beside the model alone, in one run.

    make gpu-bundle                                  # here: build/gpu
    OUT=results bash bench/gpu/run.sh atoms          # there, with MPS; python3 needs ase, matscipy, mace-torch

The model has the architecture of MACE-MP-0 medium, random weights and float32. A step rattles the atoms, makes the
neighbour list, and asks for forces. The bound feeds itself with ready lists, at the batch size that the clients reached.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "gpu"), str(ROOT / "examples" / "atoms")]
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.1f} s] {text}", flush=True)


def system(name: str):
    from ase.build import bulk, molecule

    if name == "Cu32":
        return bulk("Cu", cubic=True).repeat(2)
    atoms, other = molecule("isobutane"), molecule("H3CNH2")  # 21 atoms
    other.translate([0, 0, 4])
    return atoms + other


def medium(file: str) -> None:
    import mace  # noqa: F401 - before e3nn, which loads its constants only so
    import numpy as np
    import torch
    from e3nn import o3
    from mace import modules

    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    torch.save(modules.ScaleShiftMACE(
        r_max=6.0, num_bessel=10, num_polynomial_cutoff=5, max_ell=3, interaction_cls=block, interaction_cls_first=block,
        num_interactions=2, num_elements=89, hidden_irreps=o3.Irreps("128x0e + 128x1o"), MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=np.zeros(89), avg_num_neighbors=60.0, atomic_numbers=list(range(1, 90)), correlation=3,
        gate=torch.nn.functional.silu, atomic_inter_scale=0.8, atomic_inter_shift=0.0,
    ), file)  # fmt: skip


# -- the roles that this program plays itself


def worker(file: str) -> None:
    import ringbatch as rb
    from mace_models import load
    from potential import potential

    rb.serve(potential("mace", lambda dtype, device: load(dtype, device, file)), processes=0)


def bound(file: str, device: str) -> None:
    """For each line "system batch seconds" it answers with structures/s."""
    import numpy as np
    import torch
    from mace_models import load
    from potential import evaluate, packed
    from ringbatch.ase import neighbours

    energies, cutoff, _ = load(torch.float32, device, file)
    print("ready", flush=True)
    for line in sys.stdin:
        name, n, seconds = line.split()
        many = [system(name) for _ in range(int(n))]
        for seed, atoms in enumerate(many):
            atoms.rattle(0.02, seed=seed)
        lists = [neighbours(a, cutoff) for a in many]
        offsets = np.cumsum([0, *map(len, many)])
        given = (np.concatenate([a.numbers for a in many]), np.concatenate([a.positions for a in many]), np.stack([a.cell[:] for a in many]),
                 np.concatenate([x["edges"] + first for x, first in zip(lists, offsets)]), np.concatenate([x["shifts"] for x in lists]), offsets)  # fmt: skip
        count, began = -5, time.monotonic()
        while time.monotonic() - began < float(seconds) or count <= 0:
            y = evaluate(energies, packed(*given, torch.float32, torch.device(device)))
            _ = {k: v.double().cpu().numpy() for k, v in y.items()}
            count += 1
            if count == 0:
                began = time.monotonic()
        print(json.dumps({"rate": int(n) * count / (time.monotonic() - began)}), flush=True)


def client(seed: int, file: str, device: str) -> None:
    """With the shared model, or with a copy in this process. For each line "system begin end" it answers with its steps."""
    import numpy as np
    from ringbatch.ase import Calculator

    calculator = Calculator("mace", wait=120)
    if file != "-":
        import torch
        from mace_models import load
        from potential import alone

        torch.set_num_threads(1)
        calculator = Calculator(alone(lambda dtype, device: load(dtype, device, file), device=device))
    rng = np.random.default_rng(seed)
    print("ready", flush=True)
    for line in sys.stdin:
        name, begin, end = line.split()
        atoms, took, failed = system(name), [], ""
        at, atoms.calc = atoms.positions.copy(), calculator
        try:
            while (began := time.monotonic()) < float(end):
                atoms.positions = at + rng.normal(0, 0.02, at.shape)
                atoms.get_forces()
                if began > float(begin):
                    took.append(time.monotonic() - began)
        except Exception as e:
            failed = f"{type(e).__name__}: {e}"
        print(begin, json.dumps({"took": took, "failed": failed}), flush=True)


# -- measuring


def gpu_memory() -> float:
    """GiB in use."""
    try:
        return int(subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], stdout=-1, check=True).stdout) / 1024
    except (OSError, subprocess.SubprocessError):
        return 0.0


def now() -> dict:
    """The counters of the shared model."""
    import ringbatch as rb

    return next((m for m in rb.stats()["models"] if m["name"] == "mace"), {"ready_workers": 0})


def measure(name: str, clients: list, seconds: float, shared: bool, kill=None) -> dict:
    def counts() -> tuple[int, int]:
        found = now() if shared else {"batches": 0, "rows": 0}
        return found["batches"], found["rows"]

    begin = time.monotonic() + 12  # the first steps compile kernels, then auto learns
    for c in clients:
        c.tell(f"{name} {begin} {begin + seconds}\n")
    time.sleep(begin - time.monotonic())
    before = counts()
    if kill:
        time.sleep(seconds / 3)
        kill()
    time.sleep(max(0, begin + seconds - time.monotonic()))
    batches, rows = (b - a for a, b in zip(before, counts()))
    memory, answers = gpu_memory(), [json.loads(c.wait_for(f"{begin} ").split(" ", 1)[1]) for c in clients]
    wait = now().get("wait_time_ms", 0.0) if shared else 0.0
    failed = [a["failed"] for a in answers if a["failed"]]
    for text in sorted(set(failed))[:3]:
        say(f"  a client failed: {text[:300]}")
    took = sorted(t for a in answers for t in a["took"])
    return {"rate": len(took) / seconds, "batch": rows / max(1, batches), "p50_ms": 1000 * statistics.median(took or [0]),
            "wait_ms": wait, "gpu_gib": memory, "failed": len(failed)}  # fmt: skip


def main() -> int:
    from processes import processes, start_broker

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    p.add_argument("--clients", type=int, default=32)
    p.add_argument("--copies", type=int, default=16)
    p.add_argument("--systems", nargs="+", default=["molecule", "Cu32"])
    p.add_argument("--model", default="", help='"random" is a small one: to try the program')
    p.add_argument("--device", default="cuda")
    p.add_argument("--json", help="a file for the results")
    a = p.parse_args()
    rows: dict[str, dict] = {}

    def note(what: str, row: dict) -> None:
        rows[what] = row
        say(f"{what}: " + ", ".join(f"{k} {v:,.1f}" for k, v in row.items()))
        if a.json:
            Path(a.json).write_text(json.dumps(rows, indent=1))

    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        file = a.model or os.path.join(folder, "medium.pt")
        a.model or medium(file)
        me, one = [sys.executable, "-W", "ignore", __file__], {"OMP_NUM_THREADS": "1"}
        with processes() as start:
            start_broker(start, folder)
            workers = [start(*me, "worker", file, **one)]
            clients = [start(*me, "client", str(k), "-", a.device, **one) for k in range(a.clients)]
            alone = start(*me, "bound", file, a.device, **one)
            for c in [*clients, alone]:
                c.wait_for("ready")
            say("clients are ready")
            for count in (1, 2):
                while len(workers) < count:
                    workers.append(start(*me, "worker", file, **one))
                while now()["ready_workers"] < count:
                    time.sleep(0.1)
                for name in a.systems:
                    what = f"{name}, {a.clients} processes, workers {count}"
                    note(what, measure(name, clients, a.seconds, True))
                    batch = max(1, round(rows[what]["batch"]))
                    alone.tell(f"{name} {batch} {a.seconds / 2}\n")
                    note(f"{name}, alone at {batch}, beside workers {count}", json.loads(alone.wait_for("{")))
            note("a worker is killed", measure(a.systems[0], clients, a.seconds, True, kill=lambda: workers[0].p.send_signal(signal.SIGKILL)))
        with processes() as start:
            copies = [start(*me, "client", str(k), file, a.device, **one) for k in range(a.copies)]
            for c in copies:
                c.wait_for("ready")
            for name in a.systems:
                note(f"{name}, {a.copies} copies", measure(name, copies, a.seconds, False))
    return 0


if __name__ == "__main__":
    roles = {"worker": worker, "bound": bound, "client": client}
    if sys.argv[1:2] and sys.argv[1] in roles:
        sys.exit(roles[sys.argv[1]](*(int(x) if x.isdigit() else x for x in sys.argv[2:])))
    sys.exit(main())
