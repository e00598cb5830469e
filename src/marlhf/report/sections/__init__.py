"""The sections of the report, one file per kind of data."""
