"""Inputs, calls, states and comparisons that several folders use."""
