"""Macro actions inside other people's trainers: verl, SkyRL, slime.

`settings.py` and `advantages.py` know no engine: they turn what any of them has at hand into
advantages and returns over macro actions. `verl.py`, `skyrl.py` and `slime.py` connect that to the
hooks of one engine each, and are imported only where that engine runs.
"""
