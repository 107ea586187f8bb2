"""Run by torchrun in tests: both stages of the small setup into the folder given, then leave."""

import sys
from pathlib import Path

from training_setup import small_setup

from spikeopd.methods import opd, spad
from spikeopd.runlog import RunLog

folder, words, resume = Path(sys.argv[1]), sys.argv[2:], "--resume" in sys.argv
setup = small_setup(*(word for word in words if word != "--resume"))
with RunLog(folder, active=setup.accelerator.is_main_process, quiet=True) as log:
    spad.run(setup, log, resume=resume)
    setup.accelerator.wait_for_everyone()
    opd.run(setup, log, str(folder / "stage1" / "final"), resume=resume)
setup.accelerator.wait_for_everyone()
setup.accelerator.end_training()
