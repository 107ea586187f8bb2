"""SpikeOPD: train spiking language models and bring them to neuromorphic hardware.

`spikeopd` trains (torch), `export` lowers to integers, `neuro_sim` runs event by event and on Lava,
`energy` turns counted events into an energy report. This module imports neither torch nor numpy.
"""

__version__ = "0.1.0"
