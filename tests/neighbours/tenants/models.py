"""Tenants, each with a schema of its own."""

from django_tenants.models import DomainMixin, TenantMixin


class Client(TenantMixin):
    """A tenant."""

    auto_create_schema = True


class Domain(DomainMixin):
    """Where a tenant's site is."""
