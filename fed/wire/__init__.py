"""All that travels between a coordinator, nodes and peers: messages, payloads, transfers and calls."""
