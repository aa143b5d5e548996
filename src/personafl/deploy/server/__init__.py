"""The server, the servers of a cloud and their coordinator, as processes."""
