"""Executors: worker processes that do simulated clients' work, with the same bits however many there are."""
