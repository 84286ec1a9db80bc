"""What PyTorch asks of a call besides its result: observers, FLOP counts, sharded tensors, exits, heads before rows."""
