"""Who trains chunks of clients: this process, worker processes, or the nodes of a Ray cluster."""
