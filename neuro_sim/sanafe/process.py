"""The network on SANA-FE, in a process of its own environment: found, started, spoken to, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from neuro_sim.sanafe.description import write_network
from neuro_sim.sanafe.interpreter import Array, Outcome
from neuro_sim.sanafe.network import Network
from neuro_sim.sanafe.placement import Placement, place
from spikeopd.errors import BackendMissing, CheckFailed, short
from spikeopd.files import PrivateFolder

VARIABLE = "SPIKEOPD_SANAFE_PYTHON"
FOLDER = ".venv-sanafe"
INSTALL = f"python3 -m venv {FOLDER} && {FOLDER}/bin/pip install sanafe==2.2.9 numpy pyyaml"
ADAPTER = Path(__file__).with_name("adapter.py")
LOAD_SECONDS = 600.0  # of a network at the most


def find_python() -> Path:
    """The interpreter of SANA-FE's environment, or BackendMissing with the command that makes one."""
    chosen = os.environ.get(VARIABLE)
    root = Path(__file__).resolve().parents[2]  # a checkout of the project
    # Not in the working folder: it may be a stranger's, and what is found is run.
    python = Path(chosen) if chosen else root / FOLDER / "bin" / "python"
    if python.is_file():
        return python
    if chosen:
        raise BackendMissing(
            f"{VARIABLE}={chosen}: there is no such Python; make SANA-FE's environment with: {INSTALL}"
        )
    raise BackendMissing(
        f"SANA-FE is not here. It lives in an environment of its own (GPL-3): make sanafe, or {INSTALL}; "
        f"elsewhere, name its Python in {VARIABLE}"
    )


class ChipProcess:
    """An `Executor`: SANA-FE's Loihi in a child process. `about` has its version, prices, and the placement."""

    def __init__(self, network: Network, timeout: float = 60.0, placement: Placement | None = None) -> None:
        python = find_python()
        self.network, self.timeout = network, timeout
        placement = placement or place(network)
        self._folder = PrivateFolder("spikeopd-chip-")
        write_network(self._folder.path, network, placement)
        self._said = open(self._folder.path / "said.txt", "w+b")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [str(python), "-I", str(ADAPTER), str(self._folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the decoding loop, which ends it
        )
        try:
            ready = self._answer(max(timeout, LOAD_SECONDS))
        except BaseException:
            self.close()
            raise
        self.about = {
            "simulator": "SANA-FE",
            "version": ready["ready"],
            "prices_pj": ready["prices_pj"],
            "placement": placement.report,
            "mesh": {"width": placement.chip.width, "height": placement.chip.height},
        }

    def run(self, biases: Mapping[str, Array]) -> Outcome:
        """One token."""
        folder = self._folder.path
        names = {"biases": str(folder / "biases.npz"), "spikes": str(folder / "spikes.npz")}
        narrow = {name: bias.astype(np.int32) for name, bias in biases.items()}
        np.savez(names["biases"], **narrow)  # type: ignore[arg-type] # numpy's stub takes keywords for options
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(names).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed("has ended") from error
        counts = self._answer(self.timeout)["counts"]
        with np.load(names["spikes"], allow_pickle=False) as file:
            spikes = {
                group.name: np.unpackbits(file[f"spikes/{group.name}"], axis=1, count=group.neurons).astype(bool)
                for group in self.network.of_kind("site")
            }
            counts["traffic"] = file["traffic"]
            return Outcome(spikes, file["membranes"].astype(np.int64), counts)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()
        self._folder.cleanup()

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line of the process. It is read as it comes, because a process that hangs must not hang us."""
        assert self._process.stdout is not None
        line, end = b"", time.monotonic() + seconds
        descriptor = self._process.stdout.fileno()
        while not line.endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise self._failed(f"did not answer for {seconds:g} seconds (--timeout)")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise self._failed("ended")
            line += part
        answer: dict[str, Any] = json.loads(line)
        if answer.get("missing"):
            raise BackendMissing(f"{answer['error']}; install it with: {INSTALL}")
        if "error" in answer:
            raise self._failed(f"says: {short(answer['error'])}")
        return answer

    def _failed(self, what: str) -> CheckFailed:
        self._said.flush()
        self._said.seek(0)
        words = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return CheckFailed(f"SANA-FE {what}" + (f"; its last words: {short(words[-1])}" if words else ""))
