"""Kernelwright: the fastest correct kernel for an operator, a shape and a GPU."""

__version__ = "0.1.0"
