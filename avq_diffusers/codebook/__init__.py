"""Stored codebooks: codewords of a layer, k-means and EMA on keys."""
