"""Processes, the machine that they share, and its clock."""
