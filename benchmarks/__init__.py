"""One file per question; each prints a table and, with --json FILE, writes the same as JSON."""
