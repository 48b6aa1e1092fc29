"""One process and two (torchrun, gloo) take the same step: losses, gradients, weights."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from step_worker import CASES

ROOT = Path(__file__).resolve().parents[1]


def run(processes, *arguments, script=ROOT / "tests" / "step_worker.py"):
    launcher = [sys.executable] if processes == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*launcher, str(script), *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    for processes in (1, 2):
        run(processes, folder / str(processes))
    return [torch.load(folder / str(processes)) for processes in (1, 2)]


@pytest.mark.parametrize("case", list(CASES))
def test_two_processes_take_the_step_of_one(results, case):
    one, two = (r[case] for r in results)
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=1e-4, abs=1e-6) for k in a)
    for part, tolerance in (("gradients", 1e-5), ("weights", 1e-4)):
        for name, value in one[part].items():
            assert (value - two[part][name]).norm() <= tolerance * value.norm() + 1e-6, (part, name)


def test_replicas_that_drift_are_caught(results):
    assert results[0]["drift"] is None and "weights of the processes differ" in results[1]["drift"]
