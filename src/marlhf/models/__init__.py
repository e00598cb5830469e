"""Models: loading, scalar heads, what they say of sequences, and the tiny one built in code."""
