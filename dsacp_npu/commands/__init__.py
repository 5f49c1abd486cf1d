"""The command line: one module for each `python -m dsacp_npu <command>`."""
