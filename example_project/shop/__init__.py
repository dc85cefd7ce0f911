"""The shop behind the lottery: ordinary work that must not be done by two at a time."""
