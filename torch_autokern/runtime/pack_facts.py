"""What the binaries of a pack's record say of themselves, and whether they may run its plan: the facts behind the claims."""

from __future__ import annotations

from torch_autokern.errors import PlanError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.plan import LaunchPlan, decode_plan, entries
from torch_autokern.store.pack_manifest import BinaryFacts, EntryFacts
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.record import StoredRecord

MAX_PLAN_BYTES = 1 << 16
_MACHINE_OF = {"x86-64": "x86_64", "x86-64-v2": "x86_64", "x86-64-v3": "x86_64", "x86-64-v4": "x86_64", "aarch64": "aarch64"}


def read_binaries(stored: StoredRecord) -> tuple[BinaryFacts, ...] | PackRefusal:
    """Facts of a record's one binary, after every static check that needs no device: plan, ELF rules, and that both fit the
    target for which the record claims to be proved. Works on a machine of any other kind."""
    record, data = stored.record, stored.data
    if record.key.op not in SPECS or record.key.device_type != record.target.device_type:
        return PackRefusal(PackReason.UNKNOWN_OP, f"op {record.key.op[:80]!r} on {record.target.device_type} is unknown here")
    on_gpu = record.target.device_type == "cuda"
    name, other = ("kernel.cubin", "kernel.so") if on_gpu else ("kernel.so", "kernel.cubin")
    if name not in data or "plan.json" not in data or other in data:
        words = f"it has {', '.join(sorted(data))[:200]}; expected {name} and plan.json, and no {other}"
        return PackRefusal(PackReason.BAD_BINARY, words)
    if len(data["plan.json"]) > MAX_PLAN_BYTES:
        return PackRefusal(PackReason.BAD_PLAN, f"a plan of {len(data['plan.json'])} bytes, at most {MAX_PLAN_BYTES} in a pack")
    try:
        plan = decode_plan(data["plan.json"])
    except PlanError as error:
        return PackRefusal(PackReason.BAD_PLAN, str(error)[:400])
    digest = next(blob.sha256 for blob in record.blobs if blob.name == name)  # of these very bytes: the record was decoded
    facts = (_cubin_facts if on_gpu else _library_facts)(data[name], digest, plan, record.target.arch)
    return facts if isinstance(facts, PackRefusal) else (facts,)


def _library_facts(binary: bytes, digest: str, plan: LaunchPlan, arch: str) -> BinaryFacts | PackRefusal:
    from torch_autokern.runtime.elf import read_cpu_library

    machine = _MACHINE_OF.get(arch)
    if machine is None:
        return PackRefusal(PackReason.BAD_BINARY, f"the CPU architecture {arch[:40]!r} is unknown to this version")
    names = entries(plan)
    info = read_cpu_library(binary, names, machine=machine, digest=digest)
    if info.problems:
        return PackRefusal(PackReason.BAD_BINARY, "; ".join(info.problems)[:400])
    listed = tuple(EntryFacts(name) for name in sorted(names))
    return BinaryFacts("kernel.so", len(binary), digest, machine, 0, listed, info.imports, info.libraries)


def _cubin_facts(binary: bytes, digest: str, plan: LaunchPlan, arch: str) -> BinaryFacts | PackRefusal:
    from torch_autokern.runtime.cubin import read_cubin
    from torch_autokern.runtime.cubin_rules import check_cubin

    broken = check_cubin(binary, plan, arch)
    if broken:
        return PackRefusal(PackReason.BAD_BINARY, "; ".join(broken)[:400])
    info = read_cubin(binary)  # not malformed: that is a broken rule
    listed = tuple(
        EntryFacts(
            entry.name, entry.registers, entry.static_shared_bytes, entry.stack_bytes, entry.max_threads,
            tuple(parameter.size_bytes for parameter in entry.parameters),
        )
        for _, entry in sorted(info.entries.items())
    )  # fmt: skip
    return BinaryFacts("kernel.cubin", len(binary), digest, info.arch, info.abi_version, listed, info.undefined, ())
