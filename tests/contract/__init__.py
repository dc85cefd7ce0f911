"""What the lock promises, in every way of calling it and in every place that keeps locks."""
