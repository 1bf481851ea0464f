"""Recorded trials, one folder a device and one file an operator; read them with `kernelwright.search.recorded`."""
