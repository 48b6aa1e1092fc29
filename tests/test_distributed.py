"""One process and two (torchrun, gloo) take the same step: losses, gradients, weights."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def run(processes, *arguments, script=ROOT / "tests" / "step_worker.py"):
    launcher = [sys.executable] if processes == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*launcher, str(script), *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("case, normaliser", [
    ("even", "grpo"), ("uneven", "dapo"), ("one_and_forty_tokens", "dapo"), ("one_and_forty_tokens", "grpo"),
    ("one_process_has_nothing", "dr-grpo"), ("one_process_is_flat", "grpo")])
def test_two_processes_take_the_step_of_one(tmp_path, case, normaliser):
    results = []
    for processes in (1, 2):
        run(processes, tmp_path / str(processes), case, normaliser)
        results.append(torch.load(tmp_path / str(processes)))
    one, two = results
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=1e-4, abs=1e-6) for k in a)
    for part, tolerance in (("gradients", 1e-4), ("weights", 1e-4)):
        for name, value in one[part].items():
            assert (value - two[part][name]).norm() <= tolerance * value.norm() + 1e-6, (part, name)


