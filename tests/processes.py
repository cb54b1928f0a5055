"""Processes that tests start and measure."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest


def heeding_signals(command: list, **options: Any) -> subprocess.Popen:
    """Start it in a process group of its own, and as a terminal would: jobs in the background ignore Ctrl-C."""
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(command, start_new_session=True, **heed, **options)


def resident_mebibytes() -> float:
    """What this process has in memory, torch's tensors too."""
    path = Path("/proc/self/statm")
    if not path.exists():
        pytest.skip("the size of a process is read from /proc")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
