"""The sections of the report, a file for each."""
