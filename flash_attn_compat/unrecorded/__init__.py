"""What autograd does not record: forward and backward asked for one by one, and attention over a cache."""
