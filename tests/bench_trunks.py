"""What the trunk cache saves of a study: python -m tests.bench_trunks [STUDY], or make bench-trunks.

The study's pruned runs of one seed after the other, once with a new folder for trunks and once without, in turns.
"""

import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scipy.special import stdtrit

from tnvp import declaration, study

ROOT = Path(__file__).parent.parent


def seconds(sweep: declaration.Sweep, *more: str) -> tuple[float, float]:
    """Wall and processor time of a sweep in a folder of its own, with all that starting it takes."""
    wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as runs:
        options = [f"runs={runs}", "tracking=none", "progress=false", "threads=1", *more]
        command = [sys.executable, str(ROOT / "run.py"), "-m", *sweep.overrides(), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(name: str) -> None:
    whole = study.read(name).sweeps[0]
    ratios = []
    for seed in whole.axes["seed"]:
        sweep = whole._replace(axes=whole.axes | {"seed": [seed]})
        (with_wall, with_cpu), (wall, cpu) = seconds(sweep), seconds(sweep, "trunks=null")
        ratios.append(cpu / with_cpu)
        print(
            f"seed {seed}, {len(sweep.points())} runs: {with_cpu:.0f} s of the processor with trunks, {cpu:.0f} without "
            f"(by the clock {with_wall:.0f}, {wall:.0f}): {ratios[-1]:.2f} times",
            flush=True,
        )
    n, mean = len(ratios), sum(ratios) / len(ratios)
    spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / (n - 1)) if n > 1 else math.nan
    print(
        f"{name}: {mean:.2f} ± {stdtrit(n - 1, 0.975) * spread / math.sqrt(n):.2f} times (95 % t-interval, n = {n} seeds)"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "one_shot")
