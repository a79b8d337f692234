"""Engines that carry messages in place of the built-in one."""

__all__ = ["FLOWER"]

FLOWER = "flwr>=1.41,<1.43"
"""Versions of Flower that are tested, as pip takes them."""
