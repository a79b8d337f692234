"""Local training: one client at a time, or a group as one computation."""
