"""Do the tests notice when the code is wrong? Mutants of it are made, and the tests run on each.

`python -m tests.mutants` makes them (mutating.py), runs the tests that concern the file, and says
which mutants survive. survivors.toml explains those that may.
"""
