"""The controls of Stage 2, from one checkpoint and one budget. docs/studies.md says where each differs from the
publication it is named after; `spikeopd.registry.METHODS` lists them.
"""
