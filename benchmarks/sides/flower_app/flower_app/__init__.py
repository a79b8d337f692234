"""Rounds without training, on Flower with its own strategy."""
