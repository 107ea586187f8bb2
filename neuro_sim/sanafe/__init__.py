"""The model on SANA-FE's calibrated Loihi: its network, its placement, and the process that runs it elsewhere."""
