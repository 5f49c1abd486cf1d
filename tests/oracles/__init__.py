"""A second derivation of every rule, from the maths alone: slow loops over tokens and sets, float64, no package code.

Nothing here may import `dsacp_ref` or `dsacp_npu`. Two derivations that share a line can share its mistake.
"""
