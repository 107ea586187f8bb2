"""Run by torchrun in tests: both stages of the small setup into the folder given, then leave."""

import sys
from pathlib import Path

from training_setup import small_setup

from spikeopd.methods import opd, spad
from spikeopd.runlog import RunLog

folder = Path(sys.argv[1])
setup = small_setup(*sys.argv[2:])
with RunLog(folder, active=setup.accelerator.is_main_process, quiet=True) as log:
    spad.run(setup, log)
    setup.accelerator.wait_for_everyone()
    opd.run(setup, log, str(folder / "stage1" / "final"))
setup.accelerator.wait_for_everyone()
setup.accelerator.end_training()
