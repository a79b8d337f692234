"""Keys and certificates: the authority, credentials for TLS, and the roster of who is admitted."""
