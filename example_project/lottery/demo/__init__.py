"""The parts of `manage.py demo`: child processes, the servers made of them, a table."""
