"""From counted events to energy, in Python.

python examples/energy_report.py RUN.json      (e.g. demo/run.json)
"""

import json
import sys
from pathlib import Path

from spikeopd.contracts import Activity

run = json.loads(Path(sys.argv[1]).read_text())
for phase, counted in run["phases"].items():
    activity = Activity.from_dict(counted)
    if activity.tokens == 0:
        continue
    sops = sum(int(values.sum()) for values in activity.sops.values())
    macs = activity.macs["embed"] + activity.macs["head"]
    # Appendix E of the paper: 0.9 pJ an accumulate, 4.6 pJ a multiply-accumulate, 45 nm
    picojoules = 0.9 * sops + 4.6 * macs
    print(f"{phase}: {activity.tokens} tokens, {picojoules / activity.tokens / 1e6:.3f} uJ a token")
