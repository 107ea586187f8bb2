"""Shipped runs: `spikeopd-train --config NAME`."""
