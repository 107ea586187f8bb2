"""Run by `accelerate launch` in tests: spikeopd-train on the CPU, which the launcher's own settings cannot ask for."""

import os
import sys

from spikeopd.cli import main

os.environ["ACCELERATE_USE_CPU"] = "true"
sys.exit(main())
