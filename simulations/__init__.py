"""Simulations: fleets and peers with virtual time, devices, attacks, and comparisons."""
