"""Locks in memory: no thread is in a socket, where it could not be led."""

SECRET_KEY = "not secret"
INSTALLED_APPS = ["django_redislock"]
REDISLOCK = {"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}}
