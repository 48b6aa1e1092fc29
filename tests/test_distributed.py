"""One process and two (torchrun, gloo) take the same step, copied or sharded: losses, gradients, weights."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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


# ---------------------------------------------------------------- sharded models

FLAGS = ("--steps 2 --prompts-per-step 3 --group-size 3 --max-new-tokens 24 --eval-problems 3 --beta 0.04 --updates-per-rollout 2 "
         "--save-every 1 --workers 1 --learning-rate 1e-4").split()


def lines(path):
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in path.read_text().splitlines()]


def weights(run, step=2):
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """One run copied over two processes and one sharded: three problems, so that the processes have two and one."""
    folder = tmp_path_factory.mktemp("sharded")
    for shard in ("none", "full"):
        run(2, *FLAGS, "--shard", shard, "--out", folder / shard, script=ROOT / "train.py")
    return folder


def test_a_sharded_run_is_the_copied_one(sharded):
    for name in ("metrics.jsonl", "eval.jsonl"):
        for a, b in zip(lines(sharded / "none" / name), lines(sharded / "full" / name), strict=True):
            assert a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=1e-4, abs=1e-5) for k in a), (a, b)
    a, b = weights(sharded / "none"), weights(sharded / "full")
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max().item() for k in a) < 1e-5
    before = load_file(ROOT / "tiny" / "model.safetensors")
    assert max((a[k] - before[k]).abs().max().item() for k in a) > 1e-4


def test_a_sharded_checkpoint_goes_on_alone_and_a_lone_one_sharded(sharded, tmp_path):
    for shard, processes, *flags in (("full", 1), ("none", 2, "--shard", "full")):
        shutil.copytree(sharded / shard, tmp_path / shard)
        run(processes, "--resume", tmp_path / shard, "--steps", 3, *flags, script=ROOT / "train.py")
    alone, both = (torch.load(tmp_path / shard / "checkpoints" / "step-000003" / "optimizer.pt") for shard in ("full", "none"))
    assert alone["state"].keys() == both["state"].keys() and alone["param_groups"][0].keys() == both["param_groups"][0].keys()
    assert {s["step"].item() for o in (alone, both) for s in o["state"].values()} == {6.0}  # two updates in each of three steps
    for name in ("full", "none"):
        assert [m["step"] for m in lines(tmp_path / name / "metrics.jsonl")] == [0, 1, 2]
        assert max((weights(tmp_path / name, 3)[k] - v).abs().max().item() for k, v in weights(sharded / name).items()) < 1e-3
