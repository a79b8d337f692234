"""Run folders, checkpoints and the files that hold them, each written whole or not at all."""
