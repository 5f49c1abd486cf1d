"""Triton kernels, one concept a file; `dsacp_npu.backend.get("triton")` launches them. No device package is used."""
