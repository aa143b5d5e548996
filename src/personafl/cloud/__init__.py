"""Several servers, each with devices of its own, and a coordinator: who waits for whom, and for how long."""
