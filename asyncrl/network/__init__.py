"""The roles' sockets, and which clients they accept."""
