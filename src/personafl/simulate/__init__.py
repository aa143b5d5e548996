"""A federation in one program: its server, its clients, and what trains them."""
