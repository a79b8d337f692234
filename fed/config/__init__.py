"""Configuration: the sections of an experiment, kinds, defaults, YAML, and their valid combinations."""
