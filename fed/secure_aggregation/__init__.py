"""Secure aggregation: a coordinator that learns the sum of its clients' messages, and nothing else of them."""
