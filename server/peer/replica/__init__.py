"""Peers that agree on one model: agreement, ring and copies."""
