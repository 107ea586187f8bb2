"""Loihi 2: placement on cores, design rules, and the resource map."""
