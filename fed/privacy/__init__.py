"""Differential privacy: clipping, noise, accounting, and the ledger of what has been released."""
