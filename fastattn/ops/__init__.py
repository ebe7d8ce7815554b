"""The ops: one folder each, with its readable reference, its registration and its backends."""
