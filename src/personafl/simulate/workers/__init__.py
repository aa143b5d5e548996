"""Who trains chunks of clients: this process or worker processes; and where the states of clients are."""
