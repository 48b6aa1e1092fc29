"""Run by test_survival.py: forks a training run, kills it at a random moment, resumes it, and so on; then lets it end.

    python kill_worker.py FOLDER KILLS SECONDS SEED [FLAG ...]      SECONDS: about as long as an unbroken run takes
"""
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from train import main


def attempt(argv, seconds):
    """Run train.main(argv) in a fork, for at most this long. Returns how it ended, as os.waitpid does."""
    if (pid := os.fork()) == 0:
        os._exit(main(argv))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (done := os.waitpid(pid, os.WNOHANG))[0]:
            return done[1]
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, kills, seconds, chance = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), random.Random(sys.argv[4])
    begin = lambda: ["--resume", folder] if (Path(folder) / "config.json").exists() else ["--out", folder, *sys.argv[5:]]
    killed = 0
    while killed < kills:
        killed += attempt(begin(), chance.uniform(0.1, 0.7) * seconds) == signal.SIGKILL
        if len(list((Path(folder) / "checkpoints").glob("step-000006"))):
            break
    print(f"killed {killed} times")
    sys.exit(os.waitstatus_to_exitcode(attempt(begin(), 600)))
