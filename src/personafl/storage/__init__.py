"""What lies on disk: files that survive a crash, states of clients, run directories, journals."""
