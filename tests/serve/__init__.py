"""A real server process, and clients as they come."""
