"""Rounds of peers that mix, simulated and real."""
