"""The parts of the demos: the stage that all share, and what each of them shows on it."""
