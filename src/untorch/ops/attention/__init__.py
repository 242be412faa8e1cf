"""Attention by Triton kernels: the operator, the two kernels, and how they are launched."""
