"""From counted events to energy, under two tables of prices.

python examples/energy_report.py RUN.json      (e.g. demo/run.json)
"""

import sys

import energy

for costs in ("horowitz45", "loihi"):
    report = energy.report(sys.argv[1], costs=costs)
    print(f"{costs}: {report.tokens} tokens, {report.per_token_pj / 1e6:.3f} µJ a token")
    print(f"  teacher/student {report.teacher_over_student:.3f}, firing rate {report.firing_rate:.3f}")
    for component, picojoules in report.components_pj.items():
        print(f"  {component:12} {picojoules / report.total_pj:6.1%}")
