"""The protocol between processes: its messages, the generated code, and the limits that all sides hold to."""
