"""Speed beside the peers: ``pytest benchmarks/ --benchmark-only``."""
