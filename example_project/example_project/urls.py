"""The site is Django's admin, and one page that holds a lock while it loads."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path
from django.views.generic import RedirectView

from shop.views import export_orders

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders/export/", export_orders, name="export-orders"),
    path("", RedirectView.as_view(pattern_name="admin:index")),
]
