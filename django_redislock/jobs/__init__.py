"""Jobs: exactly one instance runs it, whatever it is."""
