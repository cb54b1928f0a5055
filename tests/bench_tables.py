"""How long a table of many runs takes to read: python -m tests.bench_tables [RUNS], or make bench-tables."""

import json
import sys
import tempfile
import time
from pathlib import Path

import yaml

from tnvp import config, results

from .test_results import config as small_config
from .test_results import summary

ROOT = Path(__file__).parent.parent


def write_runs(root: Path, runs: int) -> None:
    """Run directories as a sweep leaves them, less their streams: the table reads none."""
    whole = config.to_dict(config.compose(ROOT / "conf", [[]])[0])
    numbers = summary(small_config())
    text = yaml.safe_dump(whole, sort_keys=False)
    for seed in range(runs):
        path = root / f"run-{seed}"
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(text.replace("\nseed: 0\n", f"\nseed: {seed}\n"))
        (path / "environment.json").write_text("{}")
        (path / "summary.json").write_text(json.dumps(numbers | {"seed": seed}))


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        write_runs(Path(place), runs)
        wall, cpu = time.perf_counter(), time.process_time()
        table = results.table(place)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{len(table)} runs, {len(table.columns)} columns: {wall:.1f} s, {cpu:.1f} s of them on the processor")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
