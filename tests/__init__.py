"""The test suite. A package, so that `tests.verify.mutants` can be given to verify by its import path."""
