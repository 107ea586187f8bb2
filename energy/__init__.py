"""Analytical energy of spiking language models: counted events times published prices, beside the paper's formula.

`runs` reads and checks run.json, `flops` counts dense work in closed form, `costs` holds the prices, `models` turns
events into energy, `report` assembles, `tables`, `render`, `charts` and `page` show. numpy only; command: `cli`.
"""
