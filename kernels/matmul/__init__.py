"""Matrix products: out[M, N] = epilogue(a[M, K] @ b[K, N])."""
