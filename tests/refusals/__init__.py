"""Calls that end in one clear error before anything is written."""
