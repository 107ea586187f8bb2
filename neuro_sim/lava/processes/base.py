"""What the process models share: which step of a token it is, and the report to the host."""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lava.magma.core.model.py.model import PyLoihiProcessModel
from numpy.typing import NDArray

Array = NDArray[Any]


def spikes(port: Any) -> Array:
    """Receive spikes as bool. Lava's `recv` keeps the sender's type, and stock processes send spikes as numbers."""
    return np.asarray(port.recv(), dtype=bool)


class TokenModel(PyLoihiProcessModel):
    """A model that lives in tokens of `num_steps` Lava time steps; with num_steps = 0 time never starts again.

    Lava counts time steps from 1 and keeps counting over `run` calls, so the step within the token follows from it and
    no process needs to be told.
    """

    def __init__(self, proc_params: Any) -> None:
        super().__init__(proc_params)
        self.num_steps = int(proc_params["num_steps"])
        self._rows: list[Array] = []

    @property
    def tau(self) -> int:
        """Step within the token, from 0."""
        return int((self.time_step - 1) % self.num_steps) if self.num_steps else int(self.time_step - 1)

    @property
    def token_begins(self) -> bool:
        return self.num_steps > 0 and self.tau == 0

    @property
    def token_ends(self) -> bool:
        return self.num_steps > 0 and self.tau == self.num_steps - 1

    def tell(self, spikes: Sequence[Array], saturations: Sequence[int]) -> None:
        """Add this step to the report; send it when the token is complete. Costs nothing if nobody listens."""
        if not self.report.csp_ports:
            return
        layout = self.proc_params["layout"]
        self._rows.append(layout.row(spikes, saturations))
        if len(self._rows) == layout.shape[0]:
            self.report.send(np.stack(self._rows))
            self._rows.clear()
