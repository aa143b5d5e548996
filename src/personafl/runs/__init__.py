"""Simulated runs: recipes, the simulator, the store of client states, run directories, results."""
