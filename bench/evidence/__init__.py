"""Pieces of `bench/evidence_tldr.py` and `bench/evidence_report.py`."""
