"""Real cubins in packs, cross-compiled for Hopper GPUs on a machine without one: the ELF is the fact, the manifest a claim."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gpu_sources import cuda, needs_nvrtc, needs_triton
from pack_samples import OPTIONS, Parts, claiming, library, needs_cryptography, pack_of, parts, softmax_key, stored, verdict_on
from tiny_kernels import record_for

from torch_autokern.build.compile_cuda import compile_cuda
from torch_autokern.build.cuda_toolkit import find_triton
from torch_autokern.runtime.arming import arming_of
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.runtime.plan import InputArg, IntArg, KernelStep, LaunchPlan, OutputArg, encode_plan
from torch_autokern.store.key import Target
from torch_autokern.store.pack import Pack, parse_pack
from torch_autokern.store.pack_build import build_pack
from torch_autokern.store.pack_file import Envelope
from torch_autokern.store.pack_manifest import BinaryFacts, EntryFacts
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore

PLAN = cuda().plan
H200 = Target("cuda", "NVIDIA H200", "sm_90a", 0)
PTX = """.version 8.7
.target {arch}
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u32 n) .maxntid 64 {{ .shared .b8 room[512]; ret; }}
"""


@functools.cache
def cubin(arch: str = "sm_90a") -> bytes:
    needs_nvrtc()
    return compile_cuda(cuda(), arch).binary


@functools.cache
def older_cubin() -> bytes:
    """As CUDA 12.8 writes it: by the assembler that Triton carries."""
    needs_triton()
    tool = find_triton().packages["triton"] / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "k.ptx").write_text(PTX.format(arch="sm_90a"))
        subprocess.run([tool, "-arch=sm_90a", "k.ptx", "-o", "k.cubin"], cwd=folder, check=True, capture_output=True)
        return (Path(folder) / "k.cubin").read_bytes()


def gpu_record(binary: bytes, plan: LaunchPlan = PLAN, target: Target = H200, **data: bytes) -> StoredRecord:
    """A record of softmax on a GPU; what its kernel computes is not asked here."""
    layout = msgspec.structs.replace(softmax_key(4).tensors[0], alignment_bytes=16)
    key = msgspec.structs.replace(softmax_key(4), device_type="cuda", tensors=(layout,), outputs=(layout,))
    blobs = {"kernel.cubin": binary, "plan.json": encode_plan(plan)}
    return stored(record_for(key, target=target), {**blobs, **{name.replace("__", "."): body for name, body in data.items()}})


def gpu_parts() -> Parts:
    needs_cryptography()
    return parts(pack_of(gpu_record(cubin())))


def facts_of(record: StoredRecord) -> BinaryFacts:
    envelope = build_pack([record], OPTIONS, read_binaries)
    assert isinstance(envelope, Envelope), envelope
    pack = parse_pack(envelope, read_binaries)
    assert isinstance(pack, Pack), pack
    (binary,) = next(pack.manifests()).binaries
    return binary


def test_the_manifest_says_what_the_elf_says() -> None:
    facts = facts_of(gpu_record(cubin()))
    (entry,) = facts.entries
    assert (facts.blob, facts.arch, facts.abi, facts.imports, facts.libraries) == ("kernel.cubin", "sm_90a", 8, (), ())
    assert facts.size_bytes == len(cubin())
    assert entry == EntryFacts("scale", entry.registers, 1024, 0, 256, (8, 8, 4, 4)) and 4 <= entry.registers <= 64


def test_the_layout_of_older_tools_is_read_as_well() -> None:
    step = KernelStep("k", (1, 1, 1), (64, 1, 1), (InputArg(0), OutputArg(0), IntArg(1, 32)))
    facts = facts_of(gpu_record(older_cubin(), LaunchPlan(1, (step,))))
    assert (facts.arch, facts.abi) == ("sm_90a", 7)
    assert [(e.name, e.static_shared_bytes, e.max_threads, e.parameter_bytes) for e in facts.entries] == [
        ("k", 512, 64, (8, 8, 4))
    ]


def test_a_pack_of_a_real_cubin_is_accepted() -> None:
    assert verdict_on(gpu_parts().sealed()) is None


def _lie(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda kernel: kernel["binaries"][0].update(fields)


def _entry_lie(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda kernel: kernel["binaries"][0]["entries"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_lie(arch="sm_90"), "arch 'sm_90', the fact is 'sm_90a'"),
        (_lie(arch="sm_100a"), "arch 'sm_100a', the fact is 'sm_90a'"),
        (_lie(abi=7), "abi '7', the fact is '8'"),
        (_lie(sha256="0" * 64), "sha256"),
        (_lie(size_bytes=1), "size_bytes '1'"),
        (_lie(imports=["vprintf"]), "imports 1 of them, there are 0"),
        (_lie(entries=[]), "entries 0 of them, there are 1"),
        (_entry_lie(name="other"), "name 'other', the fact is 'scale'"),
        (_entry_lie(registers=255), "registers '255'"),
        (_entry_lie(static_shared_bytes=0), "static_shared_bytes '0', the fact is '1024'"),
        (_entry_lie(stack_bytes=8), "stack_bytes '8', the fact is '0'"),
        (_entry_lie(max_threads=1024), "max_threads '1024', the fact is '256'"),
        (_entry_lie(parameter_bytes=[8, 8, 8, 4]), "parameter_bytes '8', the fact is '4'"),
        (_entry_lie(parameter_bytes=[8, 8, 4]), "parameter_bytes 3 of them, there are 4"),
    ],
)
def test_a_manifest_that_lies_about_its_cubin_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    whole = gpu_parts()
    change(whole.kernels[0])
    refusal = verdict_on(whole.sealed())
    assert refusal is not None and refusal.reason is PackReason.BINARY_MISMATCH
    assert words in refusal.message


def test_a_manifest_that_lies_about_the_card_is_refused() -> None:
    whole = gpu_parts()
    whole.kernels[0]["place"]["arch"] = "sm_90"
    refusal = verdict_on(whole.sealed())
    assert refusal is not None and refusal.reason is PackReason.RECORD_MISMATCH and "'sm_90a'" in refusal.message


def _step(**fields: Any) -> LaunchPlan:
    return LaunchPlan(1, (msgspec.structs.replace(PLAN.steps[0], **fields),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gpu_record(cubin(), target=msgspec.structs.replace(H200, arch="sm_100a")), "built for sm_90a"),
        (lambda: gpu_record(cubin("sm_100a")), "built for sm_100a, which does not run on sm_90a"),
        (lambda: gpu_record(cubin().replace(b"sm_90a", b"sm_90z")), "malformed"),
        (lambda: gpu_record(cubin(), _step(entry="other")), "has no kernel other"),
        (lambda: gpu_record(cubin(), _step(args=PLAN.steps[0].args[:-1])), "passes 3 arguments"),
        (lambda: gpu_record(cubin(), _step(block=(512, 1, 1))), "bounded to 256"),
        (lambda: gpu_record(cubin(), _step(shared_bytes=232448)), "bytes of shared memory"),
        (lambda: gpu_record(cubin()[:-100]), "malformed"),
        (lambda: gpu_record(library()), "malformed"),
        (lambda: gpu_record(b""), "malformed"),
        (lambda: gpu_record(cubin(), kernel__so=library()), "no kernel.so"),
    ],
)
def test_a_record_whose_cubin_does_not_fit_is_refused(make: Callable[[], StoredRecord], words: str) -> None:
    needs_cryptography()
    record = make()
    refusal = read_binaries(record)
    assert isinstance(refusal, PackRefusal) and refusal.reason is PackReason.BAD_BINARY and words in refusal.message
    outcome = verdict_on(claiming(record).sealed())
    assert outcome is not None and outcome.reason is PackReason.BAD_BINARY and outcome.kernel == record.record_id


def test_code_without_suffix_is_called_so_on_a_card_with_one() -> None:
    """sm_90 code runs on an H200; the manifest says what the ELF says, not what the card is."""
    assert facts_of(gpu_record(cubin("sm_90"))).arch == "sm_90"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_pack_is_whole_and_its_kernels_are_elsewhere() -> None:
    envelope = build_pack([gpu_record(cubin())], OPTIONS, read_binaries)
    assert isinstance(envelope, Envelope)
    pack = parse_pack(envelope, read_binaries)
    assert isinstance(pack, Pack)
    assert arming_of(pack, KernelStore([])).elsewhere == pack.record_ids
