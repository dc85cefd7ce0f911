"""The minor version before this one and this one side by side: see docs/deploys.md.

Both are wheels, see tests/support/wheels.py. Processes with either contend for the same locks. What
runs in them, and what they import of the tests, must do with what both versions have.
"""
