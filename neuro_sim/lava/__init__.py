"""Lava backend: the spiking language model as real Lava processes, compiled and run by Lava's own runtime.

`decoder.LavaDecoder` is the way in. Importing this package does not import Lava; `compat.require_lava` does.
"""
