"""Equations over ``mean`` and over ``mix``: pure functions on vectors, no I/O, no clock."""
