"""Stored codebooks: a layer's codewords, k-means and EMA on keys."""
