"""Keys and certificates: the authority, credentials for TLS, and the roster of admitted nodes."""
