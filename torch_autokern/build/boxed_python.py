"""Compilers that are Python packages (NVRTC's bindings, Triton), run in the box by a fresh interpreter that sees only them."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch_autokern.build.box import BoxResult, Limits, run_boxed
from torch_autokern.errors import BuildError
from torch_autokern.runtime.cubin import MAX_CUBIN_BYTES

MAX_WORDS = 2000
_SYSTEM_LIBRARIES = tuple(Path(p) for p in ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"))
_KILLED = re.compile(r"MemoryError|bad_alloc|CPU time limit|[Oo]ut of memory|File too large|File size limit|Killed")


def run_child(
    script: Path,
    packages: Mapping[str, Path],
    request: bytes,
    *,
    scratch: Path,
    readable: Sequence[Path] = (),
    allow_weak_box: bool = False,
) -> BoxResult:
    """Run `script` with `request` on its standard input, in the box.

    `packages` maps import names (with `/` for a package inside a namespace) to where they are installed: those, the standard
    library, the system's libraries and the script's own folder, whose modules it may import, are all that it can read. It
    writes into `scratch`, its working folder.

    Raises:
        BoxError: the box could not be set up.
    """
    site = scratch / "site"
    for name, place in packages.items():
        link = site / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place)
    interpreter = Path(os.path.realpath(sys.executable))
    prefix = Path(os.path.realpath(sys.base_prefix))
    allowed = (script.parent, interpreter, prefix / "lib", *_SYSTEM_LIBRARIES, *packages.values(), *readable)
    return run_boxed(
        [str(interpreter), "-s", "-S", "-B", str(script), str(site)],
        scratch=scratch,
        readable=allowed,
        limits=Limits(),
        stdin=request,
        # Hashes of text would otherwise differ from run to run, and with them the order of sets inside a compiler.
        environment={"PYTHONHASHSEED": "0", "PYTHONNOUSERSITE": "1", "SOURCE_DATE_EPOCH": "0", "PATH": "/usr/bin:/bin"},
        allow_weak_box=allow_weak_box,
    )


def failure_words(result: BoxResult, scratch: Path, subject: str, *, keep: Literal["start", "end"] = "start") -> str:
    """Why a boxed compiler gave no result: which limit ended it, or its own words without this machine's paths. Of long words
    the start is kept, where a C++ compiler has its first error, or the end, where Python has the reason."""
    limits = Limits()
    words = clean_words(result.stderr or result.stdout, scratch, keep=keep)
    if result.timed_out:
        return f"{subject} ran past {limits.wall_seconds:.0f} s and was ended"
    if result.returncode < 0 or _KILLED.search(words):
        return f"{subject} was stopped (limits: {limits.cpu_seconds} s CPU, 6 GB memory, 64 MB a file): {words}"
    return f"does not compile: {words}"


def clean_words(raw: bytes, scratch: Path, *, keep: Literal["start", "end"] = "start") -> str:
    """A compiler's words as they may be shown: printable, without folders, about `MAX_WORDS` characters at most."""
    text = raw.decode(errors="replace").replace(f"{scratch}/", "")
    text = re.sub(r"(?<![\w.])/(?:[^\s/:'\"`()]+/)*(?=[^\s/:'\"`()]+)", "", text)
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip()
    if len(printable) <= MAX_WORDS:
        return printable
    return printable[:MAX_WORDS] + " ..." if keep == "start" else "... " + printable[-MAX_WORDS:]


def read_output(path: Path, most_bytes: int = MAX_CUBIN_BYTES) -> bytes:
    """Read a file that boxed code made: a plain file of a sane size, or none.

    Raises:
        BuildError: it is missing, something else than a plain file, or too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BuildError(f"the compiler made no {path.name}: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BuildError(f"{path.name} is not a plain file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise BuildError(f"{path.name} is larger than {most_bytes} bytes")
    return data


def private_words(binary: bytes, scratch: Path) -> tuple[str, ...]:
    """Paths and names of this machine that a binary must not carry and does."""
    names = {str(scratch), str(Path.home()), sys.prefix, sys.base_prefix, os.uname().nodename}
    known = {name.encode() for name in names if len(name) >= 6} | {b"/home/", b"/root/", b"/tmp/", b"/usr/"}
    return tuple(sorted(word.decode(errors="replace") for word in known if word in binary))
