"""verl's own process environment is not this one: its shim is loaded by verl, never by pytest."""

collect_ignore = ["verl_cpu.py", "verl_hf.py", "verl_hf_server.py", "verl_file_weights.py"]
