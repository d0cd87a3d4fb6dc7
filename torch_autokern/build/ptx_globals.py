"""PTX without global variables that nothing uses; imported by the programs that the box runs to compile.

NVRTC emits every constant at namespace scope as a global variable, used or not (13.0); Triton leaves the name of a setting that
libdevice asked for (``__CUDA_FTZ``). No rule could tell either from state that outlives a launch.
"""

from __future__ import annotations

import collections
import re

_WORD = re.compile(r"[A-Za-z_$%][\w$]*")
_GLOBAL = re.compile(
    r"^(?:\.(?:visible|weak) )?\.global\b[^;={]*?([A-Za-z_$][\w$]*)(?:\[\d*\])?\s*(?:=[^;]*)?;\n", re.MULTILINE
)


def without_unused_globals(ptx: str) -> str:
    """PTX without the global variables whose names stand nowhere else in it."""
    uses = collections.Counter(_WORD.findall(ptx))
    # Once is enough: a variable that only another one's initialiser names stays, and the cubin is refused for it.
    return _GLOBAL.sub(lambda found: "" if uses[found[1]] == 1 else found[0], ptx)
