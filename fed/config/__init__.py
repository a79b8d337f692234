"""The description of a run: sections, kinds, defaults, YAML, and what goes with what."""
