"""What is kept: keys, workloads, records, and the folders that hold them."""
