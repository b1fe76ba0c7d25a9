"""Measurements: every figure beside its limit or a peer, taken in the same run, in turns."""
