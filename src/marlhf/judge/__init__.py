"""Pairwise comparison of responses by a language model, a reward model or people."""
