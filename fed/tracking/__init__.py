"""Trackers: tools that runs are watched and compared with, beside the run's own files."""
