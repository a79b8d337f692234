"""Policies of rounds: which clients train when, and when the model moves."""
