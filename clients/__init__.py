"""One client's work: its data, its local training, one task in and one update out."""
