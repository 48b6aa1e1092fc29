"""Runs that are killed, asked to stop, or lose their numbers."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import murphy
from train import main

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--steps", "6", "--save-every", "2", "--eval-every", "2", "--prompts-per-step", "2", "--group-size", "3", "--eval-problems", "2",
         "--max-new-tokens", "24", "--workers", "1", "--turns", "2"]


def start(script, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, str(script), *map(str, arguments)], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def log(path):
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    began = time.monotonic()
    assert main(["--out", str(folder), *FLAGS]) == 0
    return folder, time.monotonic() - began


def same_run(folder, unbroken):
    for name in ("metrics.jsonl", "trees.jsonl", "eval.jsonl"):
        assert log(folder / name) == log(unbroken / name), name
    a, b = (load_file(f / "checkpoints" / "step-000006" / "model.safetensors") for f in (folder, unbroken))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def killed_run(folder, unbroken, kills, seed):
    done = start(ROOT / "tests" / "kill_worker.py", folder, kills, unbroken[1], seed, *FLAGS)
    out, err = done.communicate(timeout=600)
    assert done.returncode == 0, err
    same_run(folder, unbroken[0])
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    return int(out.split("killed ")[1].split()[0])


def test_a_run_killed_three_times_is_the_unbroken_one_bit_for_bit(unbroken, tmp_path):
    assert killed_run(tmp_path / "run", unbroken, kills=3, seed=0) >= 1


@pytest.mark.slow
def test_twenty_runs_killed_at_random_moments_are_the_unbroken_one(unbroken, tmp_path):
    assert sum(killed_run(tmp_path / str(seed), unbroken, kills=1, seed=seed) for seed in range(20)) >= 15


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_code_0_and_the_run_goes_on(number, unbroken, tmp_path):
    folder = tmp_path / "run"
    run = start(ROOT / "train.py", "--out", folder, *FLAGS)
    while run.poll() is None and not (folder / "metrics.jsonl").exists():  # it is past its first step
        time.sleep(0.01)
    run.send_signal(number)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0 and f"go on with --resume {folder}" in out and "stopping and saving after this step" in err
    steps = len(log(folder / "metrics.jsonl"))
    assert (folder / "checkpoints" / f"step-{steps:06d}" / "optimizer.pt").exists() and 1 <= steps < 6
    if number == signal.SIGINT:
        return
    assert main(["--resume", str(folder)]) == 0
    same_run(folder, unbroken[0])


def test_three_losses_in_a_row_that_are_not_finite_stop_the_run(tmp_path, monkeypatch, capsys):
    whole, calls = murphy.row_loss, []

    def broken(model, row, config):
        loss, stats, k3 = whole(model, row, config)
        calls.append(1)
        return loss * float("nan"), stats * float("nan"), k3
    monkeypatch.setattr(murphy, "row_loss", broken)
    assert main(["--out", str(tmp_path / "run"), "--save-every", "1", *[f for f in FLAGS if f != "--save-every"][:2], *FLAGS[4:]]) == 2
    assert "not finite in three steps running" in capsys.readouterr().err.splitlines()[-1]
    assert [m["skipped"] for m in log(tmp_path / "run" / "metrics.jsonl")] == [True] * 3
    a, b = (load_file(p) for p in (tmp_path / "run" / "checkpoints" / "step-000002" / "model.safetensors", ROOT / "tiny" / "model.safetensors"))
    assert all(torch.equal(a[k], b[k]) for k in a)
