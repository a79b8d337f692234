"""Aggregation algorithms and peer rules: equations over ``mean`` and ``mix``, pure functions without I/O or clock."""
