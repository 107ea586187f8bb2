"""Lava: arrays and process graph of the model, and the netx chains of other tools."""
