"""The program that the box runs to compile CUDA C++: standard input to ``kernel.cubin`` in its working folder.

Standard library and NVIDIA's bindings only. Request: JSON with `libraries` (NVRTC's built-ins, NVRTC, and nvJitLink where it is
installed; loaded by path so that no search path matters), `arch`, `options`, `headers` (names with their texts) and `source`.
Answer: JSON with `version` and `log`.

Where NVRTC's PTX has global variables that nothing names (`ptx_globals`), it is assembled without them, by nvJitLink.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from ptx_globals import without_unused_globals

MAX_LOG = 1 << 16


def assemble(ptx: str, arch: str) -> tuple[bytes, str]:
    """(cubin, log) of nvJitLink."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={arch}", "-verbose", "-Xptxas=-v"]
    linker = nvjitlink.create(len(options), options)
    text = ptx.encode()
    nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text, len(text), "kernel.ptx")
    nvjitlink.complete(linker)
    cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
    nvjitlink.get_linked_cubin(linker, cubin)
    log = bytearray(nvjitlink.get_info_log_size(linker))
    nvjitlink.get_info_log(linker, log)
    return bytes(cubin), log.decode(errors="replace")


def main() -> int:
    """Compile once; 0 when there is a cubin, 1 when NVRTC refused the source, whose words are then on standard error."""
    sys.path[0] = sys.argv[1]
    request = json.load(sys.stdin)
    for library in request["libraries"]:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    from cuda.bindings import nvrtc

    def checked(answer: tuple[object, ...]) -> object:
        code, *values = answer
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(str(code))
        return values[0] if len(values) == 1 else values

    headers = request["headers"]
    names, texts = [name.encode() for name in headers], [text.encode() for text in headers.values()]
    source = request["source"].encode()
    program = checked(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", len(names), texts, names))
    options = [option.encode() for option in request["options"]]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * int(checked(nvrtc.nvrtcGetProgramLogSize(program)))  # type: ignore[call-overload]
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    words = log.rstrip(b"\0 \n").decode(errors="replace")
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        sys.stderr.write(words or str(code))
        return 1
    cubin = b" " * int(checked(nvrtc.nvrtcGetCUBINSize(program)))  # type: ignore[call-overload]
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    raw = b" " * int(checked(nvrtc.nvrtcGetPTXSize(program)))  # type: ignore[call-overload]
    checked(nvrtc.nvrtcGetPTX(program, raw))
    ptx = raw.rstrip(b"\0").decode()
    needed = without_unused_globals(ptx)
    if needed != ptx and request["links"]:
        cubin, words = assemble(needed, request["arch"])
    Path("kernel.cubin").write_bytes(cubin)
    version = checked(nvrtc.nvrtcVersion())
    json.dump({"version": version, "log": words[-MAX_LOG:]}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
