"""Workers on the nodes of a Ray cluster, in place of those on this machine."""
