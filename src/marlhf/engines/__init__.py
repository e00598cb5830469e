"""Macro actions inside other people's trainers: verl, SkyRL, slime.

`advantages.py` knows no engine: it turns what any of them has at hand, and the settings, into
advantages and returns over macro actions. `verl.py`, `skyrl.py` and `slime.py` connect that to the
hooks of one engine each, and are imported only where that engine runs.
"""
