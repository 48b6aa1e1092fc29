"""The memory plan against measured peaks (the kernel's), against real tensors byte for byte, and what it advises."""
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

import plan
from common import random_model
from plan import GIB, Setup, activation_peak, activations, check_memory, fitting, known_models, memory_plan, parameter_count, plan_text
from plan_worker import CASES
from rollout import prefill, sampling_mode
from models import enable_checkpointing
from problems import BadInput
from train import main, settings_of

ROOT = Path(__file__).resolve().parents[1]
STATE = ("weights", "gradients", "Adam state", "reference")
OLMO = known_models()["OLMo-2 7B"]
FAST = Setup(gpus=8, row_tokens=1024, batch_tokens=8192, checkpointing=True)


# ---------------------------------------------------------------- against measurements

@pytest.fixture(scope="module")
def measured():
    """Peaks of steps in processes of their own; freed blocks go back to the system at once, so that peaks are exact."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                                "MALLOC_MMAP_THRESHOLD_": "524288", "MALLOC_TRIM_THRESHOLD_": "524288"}
    script = ROOT / "tests" / "plan_worker.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {m["case"]: m for m in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs VmHWM")
@pytest.mark.parametrize("case", list(CASES))
def test_the_plan_is_the_measured_peak_within_15_percent(measured, case):
    parts = memory_plan(*CASES[case])
    state = sum(parts[name] for name in STATE)
    assert state == measured[case]["state"]  # weights, gradients, Adam state, reference: exact
    assert parts["total"] == pytest.approx(measured[case]["grown"], rel=0.15)
    assert parts["total"] - state == pytest.approx(measured[case]["grown"] - state, rel=0.15)  # activations and logits alone


@pytest.mark.parametrize("family, bf16, checkpointing", [
    ("olmo2", False, False), ("olmo2", True, True), ("qwen3", True, False), ("qwen3", False, True)])
def test_the_rehearsal_of_one_and_two_blocks_gives_the_bytes_of_real_tensors_in_five(family, bf16, checkpointing):
    model = random_model(family, num_hidden_layers=5)
    if checkpointing:
        enable_checkpointing(model)
    setup = Setup(cuda=bf16, checkpointing=checkpointing)
    assert activations(model.config, setup, 200) == pytest.approx(activation_peak(model, 200, amp=bf16), rel=1e-3)
    model.eval()  # as for sampling
    sampled = activation_peak(model, 90, rows=2, amp=bf16, training=False)
    assert activations(model.config, setup, 90, rows=2, training=False) == sampled


def test_a_wide_vocabulary_counts_where_its_gradient_is_the_peak():
    model = random_model(vocab_size=20000, num_hidden_layers=2)
    assert activations(model.config, Setup(cuda=False), 50) == pytest.approx(activation_peak(model, 50), rel=0.02)


def test_the_kv_cache_is_that_of_the_rollout():
    model = random_model("qwen3")
    with sampling_mode(model):
        _, _, cache = prefill(model, [[5] * 33, [6] * 33], 4, 0, max_new_tokens=16)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    setup = Setup(cuda=False, group_size=4, max_new_tokens=16, batch_tokens=2 * 4 * 32, row_tokens=64)
    planned = memory_plan(model.config, setup)["sampling: KV cache"]
    assert planned == held * (1 + 1 / model.config.num_hidden_layers)  # and a copy of one layer while it grows


# ---------------------------------------------------------------- shapes that are known

def test_olmo_2_7b_by_hand():
    h, layers, inner, vocab = 4096, 32, 11008, 100352
    parameters = 2 * vocab * h + h + layers * (4 * h * h + 3 * h * inner + 4 * h)
    assert parameter_count(OLMO) == parameters == pytest.approx(7.3e9, rel=0.01)
    parts = memory_plan(OLMO, replace(FAST, shard=True))
    assert [parts[name] for name in STATE] == [4 * parameters / 8, 4 * parameters / 8, 8 * parameters / 8, 4 * parameters / 8]
    assert parts["sampling: bf16 weights"] == 2 * parameters and parts["host"] == 0
    assert parts["sampling: KV cache"] == 8192 * 2 * 33 * h * 2
    block = 4 * h * h + 3 * h * inner + 4 * h
    assert parts["loss: bf16 weights"] == 6 * (2 * block + 2 * vocab * h + h)  # two blocks and the root, with fp32 gradients


def test_offloading_moves_the_state_and_replicas_do_not_divide_it():
    sharded, offloaded, replicated = (memory_plan(OLMO, replace(FAST, shard=s, offload=o)) for s, o in ((1, 0), (1, 1), (0, 0)))
    assert [offloaded[name] for name in STATE] == [0] * 4 and offloaded["host"] == sum(sharded[name] for name in STATE)
    assert [replicated[name] for name in STATE] == [8 * sharded[name] for name in STATE]
    assert offloaded["total"] < sharded["total"] < replicated["total"]


def test_adapters_need_a_bf16_base_and_no_reference():
    parts = memory_plan(OLMO, replace(FAST, gpus=1, lora_rank=16))
    trained = 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert parts["weights"] == 2 * parameter_count(OLMO) + 4 * trained
    assert (parts["gradients"], parts["Adam state"], parts["reference"]) == (4 * trained, 8 * trained, 0)
    assert parts["total"] < 23.5 * GIB


def test_the_total_is_the_state_the_largest_moment_and_the_runtime():
    parts = memory_plan(OLMO, replace(FAST, shard=True))
    moments = [sum(v for k, v in parts.items() if k.startswith(m)) for m in ("sampling:", "loss:", "optimizer step:")]
    assert parts["total"] == pytest.approx(sum(parts[name] for name in STATE) + max(moments) + parts["runtime"])
    full = memory_plan(OLMO, replace(FAST, shard=True, logit_chunk=None))["loss: logits"]
    assert full == 2 * parts["loss: logits"] == 1024 * 100352 * 4 * plan.LOGIT_COPIES  # 1,024 positions against 512


# ---------------------------------------------------------------- what would make it fit

def test_advice_fits_and_needs_every_flag():
    setup = replace(FAST, batch_tokens=65536)
    flags, parts = fitting(OLMO, setup, 60)
    assert flags == ["--shard full", "--batch-tokens 32768"] and parts["total"] <= 60 * GIB
    assert memory_plan(OLMO, replace(setup, shard=True, batch_tokens=32768)) == parts
    for less in (dict(shard=True), dict(batch_tokens=32768)):
        assert memory_plan(OLMO, replace(setup, **less))["total"] > 60 * GIB
    kept = replace(setup, shard=True, checkpointing=False, batch_tokens=8192, row_tokens=2048)
    assert fitting(OLMO, kept, 40)[0] == ["--gradient-checkpointing"]


def test_advice_turns_to_adapters_last_and_may_have_none():
    assert fitting(OLMO, replace(FAST, gpus=1), 40)[0] == ["--lora-rank 16"]
    assert fitting(OLMO, replace(FAST, gpus=1), 8) is None
    assert fitting(OLMO, replace(FAST, shard=True), 79)[0] == []


def test_text_has_a_column_for_each_layout():
    lines = plan_text(OLMO, FAST, 79).splitlines()
    assert re.split(r"\s{2,}", lines[1]) == ["GiB per GPU", "--shard none", "--shard full", "+ --cpu-offload"]
    assert lines[2].split() == ["weights", "27.19", "3.40", "0.00"] and lines[-1] == "fits: --shard full, + --cpu-offload"


def test_the_table_in_the_readme_is_the_plans():
    """Two of its rows; `python plan.py` prints all."""
    rows = [("OLMo-2 7B", 8, 80), ("Qwen2.5 1.5B", 1, 80)]
    assert set(rows) < set(plan.WHERE)
    for line in plan.table(rows).splitlines():
        assert line in (ROOT / "README.md").read_text().splitlines()


# ---------------------------------------------------------------- from the command line

def test_plan_needs_a_config_and_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    OLMO.save_pretrained(tmp_path / "seven")  # no weights, no tokenizer
    assert main(["--plan", "--model", "./seven", "--gpus", "8", "--gpu-gib", "80", "--gradient-checkpointing",
                 "--row-tokens", "1024", "--batch-tokens", "8192"]) == 0
    said = capsys.readouterr().out
    assert "7.299 billion" in said and "8 x 80 GiB" in said and "fits: --shard full" in said
    assert [p.name for p in tmp_path.iterdir()] == ["seven"]


@pytest.mark.parametrize("flags", [["--gpus", "0"], ["--gpu-gib", "-1"], ["--model", "/no/such"]])
def test_bad_plans_are_refused(capsys, flags):
    assert main(["--plan", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_gpu_that_is_too_small_is_refused_with_flags(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    run, config, _ = settings_of(["--model", "x", "--gradient-checkpointing", "--row-tokens", "1024", "--batch-tokens", "8192"])
    with pytest.raises(BadInput, match=r"needs about \d+.\d GiB a process, and 40.0 are free.*would fit: --lora-rank 16"):
        check_memory(run, config, OLMO, torch.device("cuda"), 1)
    check_memory(run | {"gpu_gib": 1000.0}, config, OLMO, torch.device("cuda"), 1)  # taken at one's word


def test_a_cpu_is_warned_and_refused_only_when_clearly_beyond(monkeypatch, capsys):
    config = Qwen3Config(vocab_size=512, hidden_size=256, num_hidden_layers=8, intermediate_size=512)
    run, objective, _ = settings_of(["--row-tokens", "256", "--batch-tokens", "256"])
    need = memory_plan(config, plan.memory_setup(config, run, objective, 1, cuda=False))["total"] / GIB
    monkeypatch.setattr(plan, "advice", lambda *_: "")
    for free, outcome in ((1.01, "quiet"), (0.99, "warned"), (0.51, "warned"), (0.49, "refused")):
        monkeypatch.setattr(plan, "free_gib", lambda device: need * free)
        try:
            check_memory(run, objective, config, torch.device("cpu"), 1)
            said = "warned" if "warning" in capsys.readouterr().err else "quiet"
        except BadInput:
            said = "refused"
        assert said == outcome
