"""How long things take: laws of times, order statistics, and how many servers to wait for."""
