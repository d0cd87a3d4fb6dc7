"""The child of `autokern record`: runs a program as `python` would, with the recorder on, and writes the workload.

``python -m torch_autokern.cli.recorded OUTPUT script|module|code TARGET [ARGS]``
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run the program and return its exit code; the workload is written whatever the program did."""
    output, kind, target, *args = argv
    from torch_autokern import api

    with api.record() as recording:
        code = _exit_code(kind, target, args)
    recording.workload().save(Path(output))
    return code


def _exit_code(kind: str, target: str, args: list[str]) -> int:
    """Run to the end and turn how it ended into the exit code that `python` would give."""
    try:
        _run(kind, target, args)
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return request.code or 0
        print(request.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        _print_as_python_does(error)
        return 130
    except Exception as error:  # noqa: BLE001 - the program's own error, and the exit code says so
        _print_as_python_does(error)
        return 1
    return 0


def _print_as_python_does(error: BaseException) -> None:
    """The traceback from the program's first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


def _run(kind: str, target: str, args: list[str]) -> None:
    """What `python TARGET`, `python -m TARGET` or `python -c TARGET` does: argv, first entry of the path, `__main__`."""
    if kind == "module":
        sys.argv = [target, *args]
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif kind == "script":
        sys.argv = [target, *args]
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
    else:
        sys.argv = ["-c", *args]
        sys.path[0] = ""
        with tempfile.TemporaryDirectory(prefix="autokern-") as folder:
            script = Path(folder) / "command_line.py"
            script.write_text(target, encoding="utf-8")
            runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
