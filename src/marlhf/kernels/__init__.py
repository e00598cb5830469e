"""Fused GPU operations over tensors, each beside the plain function that defines it.

The plain form runs on CPUs, and tests compare the two. Nothing here knows a model or an engine.
"""
