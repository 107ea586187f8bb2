"""The Lava processes of the spiking language model and their floating-point and fixed-point models.

Every process is usable alone. A model is chosen as with Lava's own: `Loihi2SimCfg(select_tag="fixed_pt")`, or
"floating_pt".

Each process is a package of one file on purpose. To find the models of a process, Lava executes every module beside
the process's module, once for each of them, for each process of a network: with seven files side by side, compiling
two layers as a graph took 6 s, nearly all of it in that. With nothing beside them the models are found at once.
"""

from neuro_sim.lava.compat import require_lava

require_lava()
