"""The way of a call: plans, loaded kernels, the table, and the router that C++ holds."""
