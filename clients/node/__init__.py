"""The edge node: connects to a coordinator, trains its client's tasks, and sends the updates."""
