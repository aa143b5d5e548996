"""What a run will take, before it is begun: a short probe on this machine, and what follows from it."""
