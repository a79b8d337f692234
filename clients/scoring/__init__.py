"""Losses and metrics: measures of a model's outputs against targets."""
