"""Every report test gets a table of its own through `served`."""

from tiny_kernels import every_family, quiet_router, served

__all__ = ["every_family", "quiet_router", "served"]
