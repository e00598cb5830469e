"""Macro actions inside other people's trainers: verl, SkyRL, slime.

`batch.py` and `advantages.py` know no engine: they turn what any has at hand, and the settings,
into advantages and returns over macro actions. `verl.py`, `skyrl.py` and `slime.py` connect that to
the hooks of one engine each, and are imported only where that engine runs.
"""
