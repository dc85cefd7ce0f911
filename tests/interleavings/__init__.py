"""Threads are led through one another step by step: pool, inbox, watchdog, a shared handle.

frontrun decides after each bytecode which thread runs next, so a race shows itself by its number
and not by luck.
"""
