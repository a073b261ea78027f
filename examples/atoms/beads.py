# SPDX-License-Identifier: Apache-2.0
"""Path-integral molecular dynamics: the beads of i-PI share a potential (pip install ipi).

    python examples/atoms/tiny.py                     # meanwhile
    ringbatch set tiny wait_time=1s                   # or potential(…, wait_time=1): a batch leaves when all beads are in it
    python examples/atoms/beads.py [BEADS] [STEPS]

Each bead has a driver process, as ASE makes it. Prints how many batches had all beads. With wait_time=auto they are fewer:
the first beads need not wait for the last.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ringbatch as rb
from ase.build import molecule
from ase.calculators.socketio import SocketClient
from ringbatch.ase import Calculator

INPUT = """<simulation verbosity='low'>
  <total_steps>{steps}</total_steps>
  <output><properties filename='out'>[ step, potential{{electronvolt}} ]</properties></output>
  <ffsocket name='beads' mode='unix' pbc='false'><address>{address}</address><latency>1e-4</latency></ffsocket>
  <system>
    <initialize nbeads='{beads}'>
      <file mode='xyz'>start.xyz</file><velocities mode='thermal' units='kelvin'>300</velocities>
    </initialize>
    <forces><force forcefield='beads'/></forces>
    <ensemble><temperature units='kelvin'>300</temperature></ensemble>
    <motion mode='dynamics'><dynamics mode='nvt'>
      <timestep units='femtosecond'>0.5</timestep>
      <thermostat mode='pile_l'><tau units='femtosecond'>100</tau></thermostat>
    </dynamics></motion>
  </system>
</simulation>
"""


def drive(address: str, model: str, ready) -> None:
    """A driver: i-PI tells it positions, the shared model their forces."""
    atoms = molecule("isobutane")
    atoms.calc = Calculator(model)
    atoms.get_forces()
    ready.wait()
    for _ in range(600):
        try:
            return SocketClient(unixsocket=address).run(atoms)
        except (FileNotFoundError, ConnectionRefusedError):  # i-PI starts
            time.sleep(0.1)


def run(beads: int, steps: int, model: str = "tiny") -> tuple[int, int]:
    """Batches of all beads, and all batches."""
    atoms, address = molecule("isobutane"), f"ringbatch-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{x.symbol} {x.x} {x.y} {x.z}" for x in atoms]
        comment = "# CELL(abcABC): 50 50 50 90 90 90 positions{angstrom} cell{angstrom}"
        Path(folder, "start.xyz").write_text("\n".join([str(len(atoms)), comment, *lines, ""]))
        Path(folder, "input.xml").write_text(INPUT.format(beads=beads, steps=steps, address=address))
        ready = multiprocessing.Barrier(beads + 1)
        drivers = [multiprocessing.Process(target=drive, args=(address, model, ready), daemon=True) for _ in range(beads)]
        for d in drivers:
            d.start()
        ready.wait(120)
        before = counts(model)
        subprocess.run([Path(sys.executable).with_name("i-pi"), "input.xml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for d in drivers:
            d.join(10)
        after = counts(model)
    made = {n: after.get(n, 0) - before.get(n, 0) for n in after}
    return made.get(beads, 0), sum(made.values())


def counts(model: str) -> dict[int, int]:
    """Batches of each size so far."""
    found = next(m for m in rb.stats()["models"] if m["name"] == model)
    return {int(n): count for n, count in found["batch_size"]["histogram"].items()}


if __name__ == "__main__":
    beads, steps = map(int, (sys.argv[1:] + ["32", "50"][len(sys.argv) - 1 :])[:2])
    whole, batches = run(beads, steps)
    print(f"{steps} steps of {beads} beads: {whole} of {batches} batches had all {beads}")
