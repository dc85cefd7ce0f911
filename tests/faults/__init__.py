"""The fault matrix: what breaks, and what is promised all the same."""
