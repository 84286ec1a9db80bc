"""Values and LSE of every backend, in every form of a call."""
