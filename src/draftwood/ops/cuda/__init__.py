"""Kernels for GPUs, in Triton; each has its plain-torch reference beside it or in `ops/reference.py`."""
