"""What came out of a run: scores, comparisons and the report. Never imports `marlhf.train`."""
