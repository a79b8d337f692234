"""A peer of a federation without a coordinator: its neighbours, and its rounds."""
