"""Executors: workers on this machine or others that do clients' work, with the same bits however many there are."""
