"""One HTML file that compares runs. Never imports `marlhf.train`."""
