"""Real libraries and services that stand beside the package: `make neighbours`."""
