# SPDX-License-Identifier: Apache-2.0
"""A calculator for ASE: energies, forces and stresses from a model that many processes share.

    from ringbatch.ase import Calculator

    atoms.calc = Calculator("mace")
    BFGS(atoms).run(fmax=0.05)

The neighbour list is made here, on the cores of the clients. examples/atoms has the workers.

Inputs of the model, for each structure (tensors may be left out, numbers may have other widths):

    numbers:i32[atoms]   positions:f64[atoms,3]   cell:f64[3,3]
    edges:i32[edges,2]   shifts:i32[edges,3]      from atom i to atom j + shifts @ cell, in both directions

Outputs: energy:f64 forces:f64[atoms,3] cutoff:f64, and virial:f64[3,3] if it has stresses. Units are eV and Å.
"""

from __future__ import annotations

from typing import Any, Callable, Union

import numpy as np

from . import errors
from .client.connect import connect

try:
    from ase import Atoms
    from ase.calculators import calculator
    from ase.geometry import complete_cell
    from ase.stress import full_3x3_to_voigt_6_stress
    from matscipy.neighbours import neighbour_list
except ImportError as e:
    raise ImportError(f"ringbatch.ase needs ASE and matscipy: pip install ase matscipy ({e})") from e

Answers = dict[str, Any]


def neighbours(atoms: Any, cutoff: float) -> dict[str, np.ndarray]:
    """The edges and shifts of ASE's atoms: all pairs within the cutoff, in both directions, with images of the cell."""
    if not (np.isfinite(atoms.positions).all() and np.isfinite(atoms.cell[:]).all()):
        raise errors.Invalid("positions or cell are not finite: did the run before this step diverge?")
    if (atoms.pbc & ~atoms.cell[:].any(1)).any():
        raise errors.Invalid("the atoms are periodic in a direction without a cell vector: set atoms.cell, or atoms.pbc = False")
    cell = complete_cell(atoms.cell)
    if abs(np.linalg.det(cell)) <= 1e-9 * np.prod(np.linalg.norm(cell, axis=1)):
        raise errors.Invalid("the vectors of the cell lie in one plane")
    i, j, shifts = neighbour_list("ijS", cutoff=cutoff, positions=atoms.positions, cell=cell, pbc=atoms.pbc)
    return {"edges": np.stack([i, j], 1).astype("int32"), "shifts": shifts.astype("int32")}


class Calculator(calculator.Calculator):
    """Asks a model of the broker for each step.

    model: its name, or a function that takes the inputs by name and returns the outputs (as rb.connect() does).
    options: those of rb.connect(). The connection is made at the first step, in the process that makes it.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress"]  # noqa: RUF012 - as ASE declares it

    def __init__(self, model: Union[str, Callable[..., Answers]], **options: Any) -> None:
        super().__init__()
        self._named, self._options = model, {"window": 1, "wait": 60.0, "retry": 60.0, "cast": True, **options}
        self._model: Union[Callable[..., Answers], None] = None
        self._cutoff: Union[float, None] = None

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = calculator.all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        y = self._ask(self.atoms)
        energy = float(y["energy"])
        self.results = {"energy": energy, "free_energy": energy, "forces": np.asarray(y["forces"], "float64")}
        if "virial" in y and self.atoms.cell.rank == 3:
            self.results["stress"] = full_3x3_to_voigt_6_stress(-np.asarray(y["virial"], "float64") / self.atoms.get_volume())

    def _ask(self, atoms: Any) -> Answers:
        model = self._model
        if model is None:
            model = self._model = connect(self._named, **self._options) if isinstance(self._named, str) else self._named
        if self._cutoff is None:
            self._cutoff = self._send(model, Atoms(), 1.0)[1]  # no atoms
        y, cutoff = self._send(model, atoms, self._cutoff)
        while cutoff != self._cutoff:  # another version of the model
            self._cutoff = cutoff
            y, cutoff = self._send(model, atoms, cutoff)
        return y

    def _send(self, model: Callable[..., Answers], atoms: Any, cutoff: float) -> tuple[Answers, float]:
        given = {"numbers": atoms.numbers.astype("int32"), "positions": atoms.positions, "cell": atoms.cell[:], **neighbours(atoms, cutoff)}
        wanted = {t.name for t in getattr(model, "inputs", ())} or given.keys()
        if not wanted <= given.keys():
            raise errors.Invalid(f"a calculator has {', '.join(given)}; the model also wants {', '.join(sorted(wanted - given.keys()))}")
        try:
            y = model(**{name: x for name, x in given.items() if name in wanted})
        except errors.Shape as e:
            raise errors.Shape(f"{len(atoms)} atoms with {len(given['edges'])} edges do not fit the model: {e}") from e
        if not isinstance(y, dict) or not {"energy", "forces", "cutoff"} <= y.keys():
            raise errors.Invalid(f"a calculator wants a model with the outputs energy, forces and cutoff; {model!r} has others")
        if not 0 < y["cutoff"] < np.inf:
            raise errors.Invalid(f"the model answers with the cutoff {y['cutoff']}: want Å above 0")
        return y, float(y["cutoff"])

    def __getstate__(self) -> dict[str, Any]:
        """A copy, and a calculator sent to another process, connect again."""
        return {**self.__dict__, "_model": None}
