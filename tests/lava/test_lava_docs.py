"""The Python examples of docs/lava.md run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from random_models import random_model

pytest.importorskip("lava.magma", reason="lava-nc is not installed")
pytestmark = pytest.mark.lava

from export.bundle_writer import write_bundle  # noqa: E402
from neuro_sim.lava.compat import INSTALL_COMMANDS  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "lava.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, tmp_path: Path) -> None:
    write_bundle(random_model(), tmp_path / "BUNDLE")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_install_commands_are_those_of_the_error_message() -> None:
    for command in INSTALL_COMMANDS:
        assert command in PAGE
