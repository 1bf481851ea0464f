"""Attention: out = softmax(scale * q @ k^T, masked) @ v; forward, decode and backward."""
