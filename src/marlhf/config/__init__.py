"""Settings that several rooms read. None needs torch, so a recipe is checked within a second."""
