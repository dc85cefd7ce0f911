"""The example project and its demos, from the outside."""
