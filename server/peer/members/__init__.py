"""Members of a network of peers: their streams, who is present, and the service that listens."""
