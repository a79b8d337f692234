"""Peers that mix with their neighbours."""
