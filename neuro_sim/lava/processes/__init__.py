"""The Lava processes of the spiking language model and their floating-point and fixed-point models.

Every process is usable alone; choose a model as with Lava's own: `Loihi2SimCfg(select_tag="fixed_pt")` or "floating_pt".

This package holds processes and models only: Lava's model discovery executes every file beside a process's file.
"""

from neuro_sim.lava.compat import require_lava

require_lava()
