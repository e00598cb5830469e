"""Talk to models side by side in the terminal."""
