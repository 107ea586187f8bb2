"""spikeopd-bench: how fast a bundle reads and writes on this machine, and what a token costs."""
