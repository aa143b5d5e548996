"""A device as a process: its data, its state, its training, and its model afterwards."""
