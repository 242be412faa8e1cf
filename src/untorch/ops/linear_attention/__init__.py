"""Recurrent layers by Triton kernels: the convolution, the delta rule, how they are launched, the operators."""
