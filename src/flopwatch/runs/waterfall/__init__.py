"""From 100 % of the peak down to the MFU: the losses in points, what they mean, and the difference of two runs."""
