"""A run is a folder. Everything that knows its format is here: writing, reading, locks, lineage."""
