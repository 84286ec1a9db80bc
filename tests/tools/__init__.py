"""Commands, pages, benchmarks, and the repository's own rules."""
