"""What may become of uploads between a method's two rules, none of which knows of it.

uplink       compressed on the device, with error feedback; codecs: by what
around       what all of the others are: a server rule around the method's own
secure       summed in fixed point, as under masks
private      clipped, with noise in their sum; distributed: with shares of it from each client
robust       reduced by a rule that holds against some of them
fair         weighed by their losses
"""
