"""The offline search: `loop.warm` fills the store for a recorded workload."""
