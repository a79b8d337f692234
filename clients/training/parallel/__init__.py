"""Local training of one client on several devices, each with a process of its own."""
