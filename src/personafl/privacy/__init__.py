"""What differential privacy costs: how much clients reveal of themselves, by dp-accounting, without a run.

library     dp-accounting, where it is installed
losses      distributions of the privacy loss of sampled rounds, composed and kept
accounting  epsilon of rounds, and what gives an epsilon: noise, rounds, delta; by a tree too
noise       Gaussian noise from a key
discrete    the same in whole numbers: exact discrete Gaussians, vectors rounded into a ball of the lattice
distributed shares of it, that clients add to what is summed unseen
answers     one question with one unknown, answered in words
"""
