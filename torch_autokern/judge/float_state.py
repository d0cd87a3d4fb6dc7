"""How this thread rounds and what it does with denormals: the caller's, and no kernel's to change.

A kernel that left other settings behind would change what stock computes next, the judge's own reference among it.
"""

from __future__ import annotations

import torch


def float_state() -> tuple[bool, ...]:
    """The thread's settings, as its own arithmetic shows them: sums that lie between two numbers, up and down, and a denormal
    as a result and as an operand."""
    one, least, tiny = (torch.tensor(value, dtype=torch.float64) for value in (1.0, 2.0**-53, 2.0**-1022))
    small = tiny / 2
    return (
        bool(one + least > one),
        bool(-one - least < -one),
        bool(one - least / 2 < one),
        bool(small > 0),
        bool(small * 4 > tiny),
    )
