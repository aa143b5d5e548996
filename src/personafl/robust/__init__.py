"""One vector from many of which some may be hostile: rules that hold, and what mixes vectors before them.

rule         what a rule is, and how it is applied by coordinates, in chunks
coordinates  median, trimmed mean, mean around the median
choosing     vectors near to others: Krum, Multi-Krum, MDA, MoNNA, SMEA, Bulyan
weighing     mean, geometric median, centered clipping, CAF; the most that one may weigh
mixing       before a rule: nearest-neighbour mixing, bucketing, clipping, ARC
clip         running medians of norms
table        all of them by name
"""
