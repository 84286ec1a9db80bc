"""PyTorch's demands on a call besides its result: modes that observe it, FLOP counts, sharded tensors, process exit."""
