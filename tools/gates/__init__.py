"""Static gates of the CUDA kernels: what ptxas and the machine code say, and what is required.

``python -m tools.gates`` prints the table; tests/cuda/test_gates.py holds every line to its limits.
"""
