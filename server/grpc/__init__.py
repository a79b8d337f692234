"""The fleet of real nodes over gRPC: the service, leases and sessions."""
