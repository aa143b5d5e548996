"""Scoring: how well models do on clients, and what tables show of it."""

# Leave the global model at odds of more than two to one. A smaller bound hurts fewer devices, and gives up part of what
# personalization gains in the mean and in the worst decile.
CAUTION = 0.3
