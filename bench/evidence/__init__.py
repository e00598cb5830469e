"""Pieces of `bench/evidence_data.py`, `bench/evidence_pack.py` and `bench/evidence_report.py`."""
