"""Importing Lava: on every Python, whatever start method the program chose, and a clear word if it is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from neuro_sim.lava import compat
from spikeopd.errors import BackendMissing

needs_lava = pytest.mark.skipif(importlib.util.find_spec("lava.magma") is None, reason="lava-nc is not installed")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)


@needs_lava
@pytest.mark.lava
@pytest.mark.parametrize("method", ["None", "'spawn'", "'fork'"])
def test_the_start_method_of_the_program_is_kept(method: str) -> None:
    result = python(
        "import multiprocessing as mp\n"
        f"method = {method}\n"
        "mp.set_start_method(method, force=True)\n"
        "import dataclasses; original = dataclasses.dataclass\n"
        "from neuro_sim.lava.compat import lava_available\n"
        "assert lava_available()\n"
        "assert mp.get_start_method(allow_none=True) == method, mp.get_start_method(allow_none=True)\n"
        "assert dataclasses.dataclass is original\n"
        "import lava.magma.runtime.runtime\n"
    )
    assert result.returncode == 0, result.stderr


@needs_lava
@pytest.mark.lava
def test_logging_of_the_program_is_kept() -> None:
    """Every Lava process adds a handler to the root logger; none may stay."""
    result = python(
        "import logging; before = list(logging.getLogger().handlers)\n"
        "from neuro_sim.lava.decoder import LavaDecoder\n"
        "import sys; sys.path.insert(0, 'tests')\n"
        "from random_models import random_model, random_shape\n"
        "if __name__ == '__main__':\n"
        "    LavaDecoder(random_model(random_shape(layers=1))).close()\n"
        "    assert logging.getLogger().handlers == before\n"
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr


def test_missing_lava_names_the_install_command_and_exits_with_4() -> None:
    result = python(
        "import sys; sys.modules['lava'] = None\n"
        "from neuro_sim.lava.compat import lava_available, require_lava\n"
        "from spikeopd.errors import run_command\n"
        "assert not lava_available()\n"
        "sys.exit(run_command('spikeopd-run-lava', lambda argv: require_lava(), None))\n"
    )
    assert result.returncode == 4
    (line,) = result.stderr.splitlines()
    assert line.startswith("spikeopd-run-lava: Lava is not installed")
    assert "pip install --no-deps --ignore-requires-python lava-nc==0.10.0" in line


def test_too_new_a_numpy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.4.0")
    with pytest.raises(
        BackendMissing, match='Lava does not work with numpy 2.4.0; install it with: pip install "numpy<2.4"'
    ):
        compat.require_lava()
    assert not compat.lava_available()


def test_windows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(BackendMissing, match="fork, which Windows lacks"):
        compat.require_lava()


def test_importing_the_package_does_not_import_lava() -> None:
    result = python("import sys, neuro_sim.lava, neuro_sim.lava.decoder; assert 'lava.magma' not in sys.modules")
    assert result.returncode == 0, result.stderr
