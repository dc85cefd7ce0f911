"""A jepsen-style test: clients increment a counter while servers and clients fail; what is lost?

The method is that of https://jepsen.io: clients work and write down what they did, a nemesis breaks
things meanwhile, and afterwards a checker compares the histories with what the database has.

    python -m tests.jepsen --seconds 60 --seeds 1
"""
