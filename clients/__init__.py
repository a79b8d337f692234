"""Clients: their data, their local training, and the edge node; one task in and one update out."""
