"""How fast a store opens and finds a key: ``python -m benchmarks.store_open --records 100000 --json FILE``.

Records are small (one 2 KB blob), one a key, in a fresh folder on the disk that holds the temporary folder; files are in the
page cache, as they are when a job starts for the second time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import write_json
from torch_autokern.store.files import make_folders
from torch_autokern.store.indexing import derive_index
from torch_autokern.store.key import KernelKey, Target, TensorKey
from torch_autokern.store.layout import record_file
from torch_autokern.store.record import KernelRecord, Provenance, Timing, Verdict, encode_record
from torch_autokern.store.store import KernelStore, Layer

OPEN_LIMIT_MS = 100.0
_BLOB = bytes(2048)


class StoreRow(msgspec.Struct, frozen=True):
    """One question about the store; `median`, `low` and `high` over `repeats`, in `unit`."""

    case: str
    records: int
    unit: str
    median: float
    low: float
    high: float
    repeats: int
    limit: float | None = None


class StoreTimes(msgspec.Struct, frozen=True):
    """All rows with device, versions and date."""

    device: str
    versions: dict[str, str]
    date: str
    rows: tuple[StoreRow, ...]


def make_record(number: int) -> KernelRecord:
    """A small record for a key of its own."""
    layout = TensorKey("float32", (number + 1, 384), (384, 1), 4)
    return KernelRecord(
        key=KernelKey("_softmax", "cpu", (layout,), {"dim": 1, "half_to_float": False}, (layout,)),
        target=Target("cpu", f"Family-{number % 7}", "x86-64-v4", 2),
        stock_build="2.13",
        verdict=Verdict(
            "stock", 0.0, 0.0, "run_to_run", (), {}, {}, (Timing("eager", "resident", 12.0, 6.0, 2.0, 1.8, 2.1, 40, 3),), 1
        ),
        provenance=Provenance("0" * 64, "benchmark", "", "c++", "rows", {}, (), "0" * 64, {}, "", "2025-01-01T00:00:00Z"),
        blobs=(),
    )


def fill(root: Path, count: int) -> None:
    """Put `count` records in place without syncing each (a search would spread the syncs over hours)."""
    for number in range(count):
        record = make_record(number)
        raw = encode_record(record, {"binary": _BLOB})
        path = record_file(root, record.key.digest, raw[-32:].hex())
        make_folders(root, path.parent)
        path.write_bytes(raw)
        path.chmod(0o600)


def measure(folder: Path, count: int) -> tuple[StoreRow, ...]:
    """Fill a store and ask every question; checks that what is found is right."""
    root = folder / "store"
    fill(root, count)
    store = KernelStore([Layer("cache", root, writable=True)])
    rows = [_row("derive the index from all records", count, "ms", [_ms(lambda: derive_index(root, writable=True))])]
    rows.append(_row("open the table", count, "ms", [_ms(store.index) for _ in range(15)], OPEN_LIMIT_MS))
    index = store.index()
    rows.append(_row("all rows of the open table", count, "ms", [_ms(index.rows) for _ in range(5)]))
    here = make_record(0).target
    ours = [_ms(lambda: index.rows(lambda target, build: target == here)) for _ in range(5)]
    rows.append(_row("rows for one target of seven", count, "ms", ours))

    generator = random.Random(0)
    digests = [make_record(generator.randrange(count)).key.digest for _ in range(2000)]
    absent = [make_record(count + number).key.digest for number in range(2000)]
    if not all(index.lookup(digest) for digest in digests) or any(index.lookup(digest) for digest in absent):
        raise AssertionError("the table lost a key or found one that is not there")
    rows.append(_row("look up a key that is there", count, "us", _us(digests, index.lookup)))
    rows.append(_row("look up a key that is not there", count, "us", _us(absent, index.lookup)))
    ids = {digest: index.lookup(digest)[0].record_id for digest in digests}
    rows.append(
        _row("read one record with every check", count, "us", _us(digests, lambda digest: store.get(digest, ids[digest])))
    )
    fresh = iter([make_record(count + number) for number in range(50)])
    publishes = [_ms(lambda: store.publish(next(fresh), {"binary": _BLOB})) for _ in range(50)]
    rows.append(_row("publish one record durably", count, "ms", publishes))
    rows.append(_row("open the table with 50 records pending", count, "ms", [_ms(store.index) for _ in range(5)]))
    if len(store.index().rows()) != count + 50:
        raise AssertionError("the index does not list what was published")
    return tuple(rows)


def _ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def _us(digests: list[str], work: Callable[[str], object]) -> list[float]:
    times = []
    for digest in digests:
        start = time.perf_counter()
        work(digest)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _row(case: str, records: int, unit: str, times: list[float], limit: float | None = None) -> StoreRow:
    return StoreRow(case, records, unit, statistics.median(times), min(times), max(times), len(times), limit)


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000, help="largest table (default 10000)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    rows: list[StoreRow] = []
    for count in sorted({min(1000, options.records), options.records}):
        with tempfile.TemporaryDirectory(prefix="autokern-bench-") as folder:
            rows.extend(measure(Path(folder), count))
    result = StoreTimes(describe_device(), versions(), utc_date(), tuple(rows))
    print(f"{result.device}, {result.date}")
    for row in rows:
        limit = f"  (limit {row.limit:g})" if row.limit is not None else ""
        print(f"{row.records:>7}  {row.case:<40} {row.median:>10.2f} {row.unit}  [{row.low:.2f}, {row.high:.2f}]{limit}")
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
