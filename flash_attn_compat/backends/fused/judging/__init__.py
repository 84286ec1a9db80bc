"""Self-tests of kernels before their first call, and files that mark kernels whose self-test ended a process."""
