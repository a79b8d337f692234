"""Policies of rounds: synchronous, asynchronous and bounded staleness, with sampling and staleness discounts."""
