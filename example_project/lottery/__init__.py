"""The lottery at noon: several servers start it, one draws."""
