"""Programs that use fastattn; run them from the repository root with `python -m examples...`."""
