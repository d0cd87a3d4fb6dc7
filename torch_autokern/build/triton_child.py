"""The program that the box runs to compile Triton: standard input to ``kernel.cubin`` in its working folder.

The candidate's source is Python and runs here and nowhere else, so nothing that this process answers is believed: the parent
reads the cubin's own facts. Standard library and Triton only. Request: JSON with `source`, `capability` and `kernels`
(`build.triton_header.TritonKernel`). Answer: JSON in ``answer.json`` with the launch metadata of each kernel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ptx_globals import without_unused_globals

_SHARED = re.compile(r"^\.extern \.shared \.align (\d+) \.b8 global_smem\[\];\s*$", re.MULTILINE)
_HEAD = re.compile(r"^\.(?:version|target|address_size)\b.*$", re.MULTILINE)
_COPIED = (
    "shared", "num_warps", "num_ctas", "warp_size", "global_scratch_size", "global_scratch_align", "profile_scratch_size",
    "launch_cooperative_grid", "launch_pdl", "tmem_size",
)  # fmt: skip


class RefusedError(Exception):
    """What the candidate declares does not fit its source."""


def load_candidate(source: str) -> Any:
    """The candidate as a module: Triton reads a kernel's text from its file."""
    path = Path("kernel.py")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernel", path)
    if spec is None or spec.loader is None:
        raise RefusedError("the source is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    spec.loader.exec_module(module)
    return module


def build(function: Any, kernel: dict[str, Any], capability: int) -> Any:
    """Compile one kernel as its header declares it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(getattr(function, "arg_names", ()))
    declared = {**kernel["signature"], **dict.fromkeys(kernel["constexprs"], "constexpr")}
    if not names or set(names) != set(declared) or [n for n in names if n in kernel["signature"]] != list(kernel["signature"]):
        raise RefusedError(
            f"{kernel['entry']} takes ({', '.join(names)}); the header declares signature ({', '.join(kernel['signature'])})"
            f" and constexprs ({', '.join(kernel['constexprs'])}), which must be the same names, the signature in order"
        )
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in kernel["divisible_by_16"]}
    constants = {(names.index(name),): value for name, value in kernel["constexprs"].items()}
    source = ASTSource(fn=function, signature={name: declared[name] for name in names}, constexprs=constants, attrs=aligned)
    options = {key: kernel[key] for key in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")}
    options |= {"launch_cooperative_grid": kernel["cooperative"], "launch_pdl": kernel["programmatic"]}
    if kernel["maxnreg"]:
        options["maxnreg"] = kernel["maxnreg"]
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assemble(texts: list[str], capability: int, fused: bool) -> bytes:
    """Kernels in one cubin: their PTX under one head, with the one shared-memory symbol that they all name."""
    from triton.backends.nvidia.compiler import get_ptxas  # which assembler wrote that PTX version depends on Triton's

    heads = [_HEAD.findall(text) for text in texts]
    if any(head != heads[0] for head in heads):
        raise RefusedError("the kernels need different PTX versions or targets")
    alignments = [int(value) for text in texts for value in _SHARED.findall(text)]
    shared = [f".extern .shared .align {max(alignments)} .b8 global_smem[];"] if alignments else []
    bodies = [_SHARED.sub("", _HEAD.sub("", text)) for text in texts]
    Path("kernel.ptx").write_text("\n".join([*heads[0], *shared, *bodies]))
    target = re.search(r"^\.target\s+(sm_\w+)", texts[0], re.MULTILINE)
    command = [get_ptxas(capability).path, f"--gpu-name={target[1] if target else ''}", *([] if fused else ["--fmad=false"])]
    done = subprocess.run([*command, "kernel.ptx", "-o", "kernel.cubin"], capture_output=True, text=True)
    if done.returncode:
        raise RefusedError(f"ptxas: {done.stderr or done.stdout}")
    return Path("kernel.cubin").read_bytes()


def main() -> int:
    """Compile once; 0 when there is a cubin, 1 when there is none, with Python's or Triton's words on standard error."""
    sys.path[0] = sys.argv[1]
    os.environ["TRITON_CACHE_DIR"] = os.path.abspath("cache")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    request = json.load(sys.stdin)
    from triton.runtime.jit import JITFunction

    module = load_candidate(request["source"])
    built = []
    for kernel in request["kernels"]:
        function = getattr(module, kernel["entry"], None)
        if not isinstance(function, JITFunction):
            raise RefusedError(f"{kernel['entry']} is not a function under @triton.jit")
        built.append(build(function, kernel, request["capability"]))
    fused = {kernel["enable_fp_fusion"] for kernel in request["kernels"]}
    if len(fused) > 1:
        raise RefusedError("kernels of one source share enable_fp_fusion")
    texts = [one.asm["ptx"] for one in built]
    needed = [without_unused_globals(text) for text in texts]
    if len(built) == 1 and needed == texts:
        Path("kernel.cubin").write_bytes(built[0].asm["cubin"])
    else:
        assemble(needed, request["capability"], fused.pop())
    answer = {}
    for one in built:
        metadata = one.metadata
        answer[metadata.name] = {name: getattr(metadata, name, 0) for name in _COPIED}
        answer[metadata.name]["tensor_descriptors"] = len(getattr(metadata, "tensordesc_meta", None) or ())
    Path("answer.json").write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RefusedError as error:
        sys.stderr.write(str(error))
        sys.exit(1)
