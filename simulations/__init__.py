"""Simulated fleets, peers, devices and time; comparisons and reports."""
