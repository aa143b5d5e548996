"""Sums of vectors that nobody sees singly: the protocol of secure aggregation, as pure code without any network."""
