"""Processes and the machine that they share."""
