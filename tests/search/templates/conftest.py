"""A training step gets a table of its own through `served`."""

from tiny_kernels import quiet_router, served

__all__ = ["quiet_router", "served"]
