"""Codecs: how the values of a client update are encoded for the wire."""
