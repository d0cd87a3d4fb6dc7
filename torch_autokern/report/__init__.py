"""What people look at: measurements as typed JSON, and the tables made from them."""
