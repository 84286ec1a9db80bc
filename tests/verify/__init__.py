"""verify judges kernels: its verdicts, reports and commands."""
