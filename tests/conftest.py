"""Shared fixtures: small random models in every shape the contract allows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Two test processes share two cores: one thread each, and none that spins while it waits. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.path.insert(0, str(Path(__file__).parent))
