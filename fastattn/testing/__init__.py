"""What tests and benchmarks share: the pass rule, plain-PyTorch peers, makers of inputs.

Needs NumPy (the ``test`` extra) for ``fastattn.testing.philox``; the library itself never imports
this package.
"""

from fastattn.testing.backends import backends, why_not
from fastattn.testing.emulator import emulator_launches
from fastattn.testing.inputs import LAYOUTS, Inputs, with_layout
from fastattn.testing.memory import poisoned_memory
from fastattn.testing.tolerances import FLOORS, check, check_all

__all__ = [
    "FLOORS",
    "LAYOUTS",
    "Inputs",
    "backends",
    "check",
    "check_all",
    "emulator_launches",
    "poisoned_memory",
    "why_not",
    "with_layout",
]
