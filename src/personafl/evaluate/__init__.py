"""Scoring: how well models do on clients, and what tables show of it."""
