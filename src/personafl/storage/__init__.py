"""What lies on disk: files, states of clients, run directories, journals, model files."""
