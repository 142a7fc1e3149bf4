"""Files that are whole or absent, checksums, rows read from files, and records as JSON."""
