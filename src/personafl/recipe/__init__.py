"""The recipe of a run, and every section of it."""
