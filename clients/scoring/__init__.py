"""Losses and metrics: what is measured on a batch."""
