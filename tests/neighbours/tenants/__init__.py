"""The application of tenants_site.py: its tenants."""
