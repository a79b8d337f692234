"""Data sets that an experiment can name."""
