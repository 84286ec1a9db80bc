"""Self-tests of kernels before their first call, and marks of kernels that ended a process."""
