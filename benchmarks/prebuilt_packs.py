"""The packs that come with this package: search kernels for named shapes on this machine, and write what is proved.

    python -m benchmarks.prebuilt_packs --name NAME [--sets minilm,half] [--threads 2] [--budget MINUTES] [--store FOLDER]

Stop it at any time: the store is kept, and the same command goes on with it. ``--budget 0`` searches nothing and packs what the
store has, which another machine may have proved. Written are ``torch_autokern/packs/NAME.akpack``, its id into
``torch_autokern/store/shipped.py``, and the table in ``docs/prebuilt-packs.md``, all made from the packs that lie there.
Nothing is measured again: times are those of the evidence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.shapes import SETS, keys_of
from torch_autokern.report.cases import case_name
from torch_autokern.report.device import describe_device, utc_date
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.runtime.target import stock_build
from torch_autokern.search.loop import warm
from torch_autokern.search.outcome import Progress
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.key import DeviceType, KernelKey
from torch_autokern.store.pack import Pack, parse_pack
from torch_autokern.store.pack_build import PackOptions, build_pack, check_whole, pack_bytes
from torch_autokern.store.pack_file import SUFFIX, read_pack
from torch_autokern.store.pack_install import SHIPPED_FOLDER
from torch_autokern.store.pack_refusal import PackRefusal
from torch_autokern.store.record import StoredRecord, Timing
from torch_autokern.store.store import KernelStore, open_store
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry

ROOT = Path(__file__).parents[1]
IDS = ROOT / "torch_autokern" / "store" / "shipped.py"
TABLE = ROOT / "docs" / "prebuilt-packs.md"
LIMIT_BYTES = 20_000_000
DEVICE_SETS: dict[DeviceType, tuple[str, ...]] = {
    "cpu": ("minilm", "cpu_table", "cpu_matmul", "half", "backward"),
    "cuda": ("headline", "gpu_table", "products"),
}
_INTRO = """\
# Packs that come with this package

Written by `python -m benchmarks.prebuilt_packs`; do not edit. `pip install` brings these packs, and `autokern.optimize(model)`
uses them with no search where they are *armed*: on the device, with the thread count and the major.minor of PyTorch of their
proof. Elsewhere they are right and wait: `autokern pack verify NAME --replay` proves them again on your machine in about a
minute each, and the receipt arms them. How they are trusted, and how to switch them off: [packs](packs.md).
"""


def search(keys: Sequence[KernelKey], threads: int, store: Path, minutes: float) -> None:
    """Search kernels for keys, each with the same share of the time, and keep what is proved in a folder."""
    share = 1e6 / len(keys)
    entries = tuple(WorkloadEntry(key, 1, share) for key in keys)
    workload = Workload(SCHEMA, str(torch.__version__), describe_device(), threads, 1e6, entries)

    def say(event: Progress) -> None:
        if event.activity == "key_done" and event.key is not None:
            words = f"{event.keys_done} of {event.keys_total} keys, {event.keys_won} won"
            print(f"{case_name(event.key)}: {event.message}; {words}", flush=True)

    print(warm(workload, store=store, budget_seconds=60 * minutes, on_event=say))


def shippable(store: KernelStore, keys: Sequence[KernelKey]) -> list[StoredRecord]:
    """Records of keys that nothing speaks against; of each key, thread count and accuracy class the one with the best bound,
    because no other would ever be chosen."""
    best: dict[tuple[str, int, str], StoredRecord] = {}
    for key in keys:
        for stored in store.records(key.digest):
            if stored.record.key != key or not store.notes(key.digest, stored.record_id).may_be_shipped:
                continue
            slot = key.digest, stored.record.target.threads, stored.record.verdict.accuracy_class
            if slot not in best or _rank(stored) > _rank(best[slot]):
                best[slot] = stored
    return list(best.values())


def _rank(stored: StoredRecord) -> tuple[float, str]:
    return stored.record.verdict.timings[0].ratio_low, stored.record_id


def write_pack(records: Sequence[StoredRecord], name: str, version: int, folder: Path) -> Pack:
    """Build the pack, check every byte of it as a reader does, and write its file.

    Raises:
        SystemExit: a record cannot be shipped, or the folder would hold too much.
    """
    built_for = sorted({f"{r.record.target.name} ({r.record.target.arch})" for r in records})
    notes = f"Made by this project's own search on {', '.join(built_for)}; the table is docs/prebuilt-packs.md."
    options = PackOptions(name, version, "Apache-2.0", "torch_autokern", notes)
    envelope = build_pack(records, options, read_binaries)
    pack = envelope if isinstance(envelope, PackRefusal) else parse_pack(envelope, read_binaries)
    if isinstance(pack, PackRefusal):
        raise SystemExit(f"cannot pack {pack.kernel[:12]}: {pack}")
    broken = check_whole(pack)
    if broken:
        raise SystemExit(f"cannot pack {broken[0].kernel[:12]}: {broken[0]}")
    body, path = pack_bytes(pack.envelope), folder / f"{name}{SUFFIX}"
    others = sum(file.stat().st_size for file in folder.glob(f"*{SUFFIX}") if file != path)
    if others + len(body) > LIMIT_BYTES:
        raise SystemExit(f"{len(body) + others} bytes of packs, at most {LIMIT_BYTES} may be shipped: choose fewer --sets")
    folder.mkdir(exist_ok=True)
    path.write_bytes(body)
    return pack


def read_packs(folder: Path) -> list[Pack]:
    """The packs that lie in a folder, by name.

    Raises:
        SystemExit: a file that is no pack.
    """
    packs = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        envelope = read_pack(path)
        pack = envelope if isinstance(envelope, PackRefusal) else parse_pack(envelope, read_binaries)
        if isinstance(pack, PackRefusal):
            raise SystemExit(f"{path}: {pack}")
        packs.append(pack)
    return packs


def ids_module(before: str, packs: Sequence[Pack]) -> str:
    """The text of `shipped.py` with the ids of these packs; what stands before the table is kept."""
    head = before[: before.index("SHIPPED: ")]
    if not packs:
        return f"{head}SHIPPED: dict[str, str] = {{}}\n"
    lines = "".join(f'    "{pack.index.name}": "{pack.pack_id}",\n' for pack in packs)
    return f"{head}SHIPPED: dict[str, str] = {{\n{lines}}}\n"


def table(packs: Sequence[Pack]) -> str:
    """The page that people read."""
    lines = [_INTRO]
    if not packs:
        lines.append("No pack is shipped yet.\n")
    for pack in packs:
        index, size = pack.index, len(pack_bytes(pack.envelope))
        records = sorted(pack.records(), key=lambda r: (case_name(r.record.key), r.record.target.threads, r.record_id))
        lines += [
            f"## {index.name} {index.version}\n",
            f"{len(pack)} kernels, {size / 1e6:.2f} MB, {index.licence}, newest record of {index.created[:10]}; id "
            f"`{pack.pack_id[:16]}`. {index.notes}\n",
            "Milliseconds; ratio is stock over the kernel with its 99 % interval; errors are the largest of all families of "
            "inputs, against\nfloat64, in units of the result's natural scale.\n",
            "| call | threads | torch | class | output pages | stock | kernel | ratio | error | stock's error | idea |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(_line(stored) for stored in records),
            "",
        ]
    return "\n".join(lines)


def _line(stored: StoredRecord) -> str:
    record, verdict = stored.record, stored.record.verdict
    timing: Timing = verdict.timings[0]
    worst = max(verdict.families, key=lambda family: family.error_max, default=None)
    errors = f"{worst.error_max:.1e} | {worst.stock_max:.1e}" if worst else "exact | exact"
    return (
        f"| {case_name(record.key)} | {record.target.threads or ''} | {record.stock_build} | {verdict.accuracy_class} | "
        f"{timing.pages} | {timing.stock_us / 1e3:.3g} | {timing.candidate_us / 1e3:.3g} | {timing.ratio:.2f}x "
        f"[{timing.ratio_low:.2f}, {timing.ratio_high:.2f}] | {errors} | {record.provenance.idea.replace('|', '/')} |"
    )


def main(arguments: list[str]) -> None:
    """Search, pack, and write what is generated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the pack, and of its file")
    parser.add_argument("--version", type=int, default=1, help="a whole number that only rises")
    parser.add_argument("--device", choices=tuple(DEVICE_SETS), default="cpu")
    parser.add_argument("--sets", default="", help=f"comma-separated, of {', '.join(SETS)}; by default the device's own")
    parser.add_argument("--only", default="", help="only keys whose name contains this")
    parser.add_argument("--threads", default="", help="comma-separated thread counts to prove for, one after another")
    parser.add_argument("--budget", type=float, default=60.0, help="minutes, shared by the thread counts; 0: pack only")
    parser.add_argument("--store", type=Path, help="folder that keeps the records (build/prebuilt/NAME)")
    options = parser.parse_args(arguments)
    sets = [name for name in options.sets.split(",") if name] or list(DEVICE_SETS[options.device])
    unknown = sorted(set(sets) - SETS.keys())
    if unknown:
        parser.error(f"unknown sets: {', '.join(unknown)}")
    keys = keys_of(sets, options.device, [options.only])
    if not keys:
        parser.error(f"no key of {', '.join(sets)} is called {options.only!r}")
    store = (options.store or ROOT / "build" / "prebuilt" / options.name).absolute()
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    counts = [int(words) for words in options.threads.split(",") if words] or [torch.get_num_threads()]
    here = f"{describe_device(options.device)}, torch {stock_build()}" if options.budget > 0 else "no search"
    print(f"{utc_date()}, {here}: {len(keys)} keys, store {store}", flush=True)
    for threads in counts if options.budget > 0 else ():
        torch.set_num_threads(threads)
        search(keys, threads, store, options.budget / len(counts))
    records = shippable(open_store(choice=FolderChoice(store, "named by the caller")), keys)
    if not records:
        raise SystemExit("nothing was proved faster yet; run it again with a larger --budget")
    pack = write_pack(records, options.name, options.version, SHIPPED_FOLDER)
    packs = read_packs(SHIPPED_FOLDER)
    IDS.write_text(ids_module(IDS.read_text(), packs))
    TABLE.write_text(table(packs))
    print(f"{SHIPPED_FOLDER / (options.name + SUFFIX)}: {len(pack)} kernels, {len(pack_bytes(pack.envelope)) / 1e6:.2f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
