"""Branch coverage of the files of store, packs and trust by their own fast tests; exit code 1 below 100 %.

    python -m tests.store.coverage_of_store [--json FILE]

Children that are forked and killed are not counted, so every branch is also taken in a test's own process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torch_autokern"
FILES = (*sorted((PACKAGE / "store").glob("*.py")), PACKAGE / "runtime" / "pack_facts.py")
TESTS = (ROOT / "tests" / "store", ROOT / "tests" / "packs")


def measure(folder: Path) -> tuple[float, str]:
    """Per cent of lines and branches taken, and the table with what is missing. `folder` holds the data."""
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data")}
    include = ",".join(map(str, FILES))
    coverage = [sys.executable, "-m", "coverage"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long and not cuda", *map(str, TESTS)]
    done = subprocess.run(
        [*coverage, "run", "--branch", f"--include={include}", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return 0.0, done.stdout[-3000:] + done.stderr[-1000:]
    table = subprocess.run([*coverage, "report", "--show-missing"], cwd=ROOT, env=environment, capture_output=True, text=True)
    report = folder / "coverage.json"
    subprocess.run([*coverage, "json", "-q", "-o", str(report)], cwd=ROOT, env=environment, check=True)
    return float(json.loads(report.read_text())["totals"]["percent_covered"]), table.stdout


def main(arguments: list[str]) -> int:
    """Measure, print the table, and say whether it is whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figure here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autokern-coverage-") as folder:
        percent, table = measure(Path(folder))
    print(table)
    if options.json:
        options.json.write_text(
            json.dumps({"percent": percent, "files": [str(path.relative_to(ROOT)) for path in FILES]}) + "\n"
        )
    return int(percent < 100.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
