"""The core: an algorithm is two pure rules joined by two typed messages; here is all they are made of."""
