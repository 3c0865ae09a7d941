"""What the command line hands on: `regard lab`, `regard attend` and `regard cost`."""
