"""train.py from the command line: run folder, resume, bad input. Uses tiny/ and the real executor."""
import json
import random
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM

import train
from common import byte_tokenizer, random_model
from problems import BadInput, Test
from models import TINY, check_head, wants_shards
from runs import cut_log, draw_curves, final_table, log, save_checkpoint, shown_test
from train import check_replicas, main, problems_of_step, settings_of, warn, warn_of_filters

SMALL = ["--prompts-per-step", "2", "--group-size", "4", "--eval-problems", "4", "--workers", "1"]
TIMES = ("seconds", "tokens_per_second")


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def without_times(records):
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in records]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    assert main(["--out", str(folder), "--steps", "4", "--save-every", "2", *SMALL]) == 0
    return folder


# ---------------------------------------------------------------- a run

def test_a_run_folder_holds_what_the_readme_says(unbroken):
    assert {p.name for p in unbroken.iterdir()} == {"config.json", "metrics.jsonl", "trees.jsonl", "eval.jsonl", "curves.png", "checkpoints"}
    metrics = lines(unbroken / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    wanted = {"reward_turn1", "solved_turn1", "solved_prompts", "group_std", "flat_groups", "pruned_share", "loss", "k3_mean", "k3_max", "clip_share",
              "grad_norm", "entropy", "length_mean", "length_max", "truncated_share", "tokens_per_second", "seconds_rollout",
              "seconds_execution", "seconds_optimisation", "infra", "distinct_responses"}
    assert all(wanted <= set(m) for m in metrics) and all(m["nodes"] == m["groups"] * 4 for m in metrics)
    assert (unbroken / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [e["step"] for e in lines(unbroken / "eval.jsonl")] == [0, 4]
    for e in lines(unbroken / "eval.jsonl"):
        assert len(e["iter"]) == 3 and e["iter"] == sorted(e["iter"]) and all(0 <= v <= 100 for v in e["iter"])


def test_logged_trees_are_whole(unbroken):
    trees = lines(unbroken / "trees.jsonl")
    assert [t["step"] for t in trees] == [0, 0, 1, 1, 2, 2, 3, 3]
    for tree in trees:
        for node in tree["nodes"]:
            assert node["reward"] == node["status"].count("passed") / len(node["status"])
            assert node["turn"] == 1 or tree["nodes"][node["parent"]]["reward"] < 1
            assert node["credit"] >= node["reward"] and "Passed" in node["feedback"]
            group = tree["groups"][node["group"]]
            assert group["parent"] == node["parent"] and tree["prompt"] in group["prompt"]  # as the model read it
            assert node["turn"] == 1 or tree["nodes"][node["parent"]]["feedback"] in group["prompt"]
            assert len(node["status"]) == len(tree["tests"]) and tree["tests"][0].startswith("assert f(0) == ")


def test_config_says_what_made_the_run(unbroken):
    made = json.loads((unbroken / "config.json").read_text())["environment"]
    assert made["torch"] == torch.__version__ and made["python"] == sys.version.split()[0] and made["processes"] == "1"
    assert set(made) == {"started", "commit", "python", "torch", "transformers", "processes", "machine"} and all(made.values())


def test_tests_are_shown_in_words():
    assert shown_test(Test("assert", code="assert f(1) == 2")) == "assert f(1) == 2"
    assert shown_test(Test("stdin", input="3\n", expected="9\n")) == "stdin '3\\n' -> '9\\n'"
    assert shown_test(Test("call", input='[1]\n"a"', expected="2", entry_point="f")) == 'f([1], "a") == 2'


def test_a_checkpoint_is_an_ordinary_model_folder(unbroken):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = unbroken / "checkpoints" / "step-000004"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    start = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters()))


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(unbroken, tmp_path, capsys):
    folder = tmp_path / "broken"
    assert main(["--out", str(folder), "--steps", "2", "--save-every", "2", *SMALL]) == 0
    with open(folder / "metrics.jsonl", "a") as file:  # what a kill in step 3 leaves behind
        file.write(json.dumps({"step": 2, "loss": 9}) + "\n" + '{"step": 3, "lo')
    (folder / "checkpoints" / "step-000003.part").mkdir()
    assert main(["--resume", str(folder), "--steps", "4"]) == 0
    assert without_times(lines(folder / "metrics.jsonl")) == without_times(lines(unbroken / "metrics.jsonl"))
    assert lines(folder / "trees.jsonl") == lines(unbroken / "trees.jsonl")
    assert lines(folder / "eval.jsonl")[-1] == lines(unbroken / "eval.jsonl")[-1]
    one, two = weights(unbroken, 4), weights(folder, 4)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert f"run folder: {folder}" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [
    ["--credit", "mers", "--gamma", "0.5", "--prune", "interp", "--budget", "1"], ["--prune", "intrap", "--budget", "2", "--normaliser", "dapo"],
    ["--method", "grpo", "--normaliser", "dr-grpo"], ["--method", "grpo-mt", "--turns", "3", "--reward", "binary"],
    ["--updates-per-rollout", "2", "--beta", "0.04", "--gradient-checkpointing"], ["--temperature", "0.8", "--top-p", "0.9", "--top-k", "50"]])
def test_every_way_to_train_runs(tmp_path, flags):
    assert main(["--out", str(tmp_path / "r"), "--steps", "1", *SMALL, *flags]) == 0
    (m,) = lines(tmp_path / "r" / "metrics.jsonl")
    assert m["skipped"] is False and (m["grad_norm"] > 0 or m["flat_groups"] == 1)
    if "intrap" in flags:
        assert m["pruned_share"] == 0.5
    if "grpo" in flags:
        assert m["nodes"] == 8 and "reward_turn2" not in m
    if "grpo-mt" in flags:
        assert m["nodes"] <= 8 * 3 and m["groups"] >= 2


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path, unbroken):
    for name, seed in (("same", "0"), ("other", "1")):
        assert main(["--out", str(tmp_path / name), "--steps", "1", "--seed", seed, *SMALL]) == 0
    first = without_times(lines(unbroken / "metrics.jsonl"))[:1]
    assert without_times(lines(tmp_path / "same" / "metrics.jsonl")) == first != without_times(lines(tmp_path / "other" / "metrics.jsonl"))


def test_a_run_ends_at_a_number_of_programs_and_its_resume_takes_no_step_more(tmp_path, unbroken):
    counts = [m["nodes"] for m in lines(unbroken / "metrics.jsonl")]
    most = counts[0] + 1  # reached in the second step
    assert main(["--out", str(tmp_path / "r"), "--steps", "4", "--max-programs", str(most), *SMALL]) == 0
    assert [m["nodes"] for m in lines(tmp_path / "r" / "metrics.jsonl")] == counts[:2]
    assert [e["step"] for e in lines(tmp_path / "r" / "eval.jsonl")] == [0, 2]
    (tmp_path / "r" / "eval.jsonl").write_text("")  # killed before the last evaluation
    assert main(["--resume", str(tmp_path / "r")]) == 0
    assert len(lines(tmp_path / "r" / "metrics.jsonl")) == 2 and [e["step"] for e in lines(tmp_path / "r" / "eval.jsonl")] == [2]


def test_problems_come_in_epochs_without_repeats():
    steps = [problems_of_step(10, 4, step, seed=0) for step in range(5)]
    flat = [i for step in steps for i in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    assert problems_of_step(10, 4, 3, seed=0) == steps[3] != problems_of_step(10, 4, 3, seed=1)
    assert sorted(problems_of_step(3, 7, 0, seed=0)) == sorted(random.Random("0 0").sample(range(3), 3) * 2 + [problems_of_step(3, 7, 0, 0)[6]])


# ---------------------------------------------------------------- loggers

def test_tensorboard_and_wandb_get_what_metrics_jsonl_gets(tmp_path, monkeypatch):
    board, sweep = [], []
    writer = types.SimpleNamespace(add_scalar=lambda name, value, step: board.append((step, name, value)), flush=lambda: None)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=lambda folder, purge_step: writer))
    wandb = types.SimpleNamespace(init=lambda **settings: types.SimpleNamespace(
        log=lambda values, step: sweep.extend((step, name, value) for name, value in values.items()), settings=settings))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = tmp_path / "r"
    assert main(["--out", str(folder), "--steps", "1", "--tensorboard", "--wandb", *SMALL]) == 0
    (m,), scores = lines(folder / "metrics.jsonl"), lines(folder / "eval.jsonl")
    wanted = [(0, name, float(value)) for name, value in m.items() if name != "step" and value is not None]
    evals = [(e["step"], f"held_out_iter{k + 1}", value) for e in scores for k, value in enumerate(e["iter"])]
    assert board == sweep == evals[:3] + wanted + evals[3:]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_logger_whose_package_is_missing_is_refused_before_anything_is_loaded(capsys, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(train, "load_tokenizer", lambda name: pytest.fail("loaded"))
    said = refused(capsys, ["--" + package, "--out", str(tmp_path / "run")])
    assert f"pip install {package}" in said and not (tmp_path / "run").exists()


def test_what_is_not_there_is_not_logged():
    seen = []
    log([lambda step, values: seen.append((step, values))], 3, {"a": None, "b": True, "c": 0.5})
    assert seen == [(3, {"b": 1.0, "c": 0.5})]


# ---------------------------------------------------------------- bad input: one sentence, exit code 2

@pytest.fixture
def no_template(tmp_path):
    random_model().save_pretrained(tmp_path / "m")
    byte_tokenizer(chat_template=None).save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")


def refused(capsys, argv):
    assert main(argv) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("train.py: ") and "Traceback" not in said[0]
    return said[0]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


OK_ROW = {"task_id": "a", "prompt": "Write f.", "tests": [{"kind": "assert", "code": "assert f(1) == 2"}]}


@pytest.mark.parametrize("argv, words", [
    (["--model", "/no/such/folder"], "no model folder"), (["--model", "./nor-this"], "no model folder"), (["--budget", "0", "--prune", "interp"], "--budget"),
    (["--group-size", "1"], "--group-size"), (["--resume", "/no/such/run"], "no run folder"), (["--keep", "0"], "--keep"),
    (["--dataset", "/no/such.jsonl"], "/no/such.jsonl"), (["--max-new-tokens", "510"], "prompt has"), (["--learning-rate", "-1"], "--learning-rate"),
    (["--shard", "some"], "--shard"), (["--shard", "full"], "torchrun"), (["--cpu-offload", "--shard", "none"], "--shard full")])
def test_bad_flags_are_refused(capsys, tmp_path, argv, words):
    out = [] if "--resume" in argv else ["--out", str(tmp_path / "run")]
    assert words in refused(capsys, argv + out)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rows, words", [
    ([], "no problems"), ([OK_ROW | {"tests": []}], "test"), ([{k: v for k, v in OK_ROW.items() if k != "prompt"}], "prompt"), ([OK_ROW, OK_ROW], "twice")])
def test_bad_data_sets_are_refused_with_file_and_row(capsys, tmp_path, rows, words):
    path = write(tmp_path / "data.jsonl", *rows)
    said = refused(capsys, ["--dataset", path, "--out", str(tmp_path / "run")])
    assert "data.jsonl" in said and (words in said or not rows or words == "twice") and not (tmp_path / "run").exists()


def test_a_model_without_chat_template_is_refused(capsys, no_template):
    assert "chat template" in refused(capsys, ["--model", no_template, "--dataset", "tiny"])


def test_a_model_that_caps_its_logits_is_refused():
    config = Gemma2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
                          num_key_value_heads=1, final_logit_softcapping=0.1)
    with pytest.raises(BadInput, match="Gemma2ForCausalLM changes its logits"):
        check_head(Gemma2ForCausalLM(config).eval())
    check_head(random_model())
    check_head(random_model().bfloat16())


def test_shards_are_for_big_models_on_several_gpus():
    def wants(parameters, device, world, **run):
        return wants_shards(parameters, {"shard": "auto", "cpu_offload": False, "lora_rank": None} | run, device, world)
    assert wants(2e9, "cuda", 8) and not wants(5e8, "cuda", 8) and not wants(2e9, "cuda", 1) and not wants(2e9, "cpu", 8)
    assert wants(1e6, "cpu", 2, shard="full") and not wants(1e6, "cpu", 1, shard="full") and not wants(2e9, "cuda", 8, shard="none")
    assert wants(1e6, "cuda", 2, cpu_offload=True) and not wants(2e9, "cuda", 8, lora_rank=4)


def test_a_prompt_longer_than_the_context_is_refused(capsys, tmp_path):
    path = write(tmp_path / "long.jsonl", OK_ROW | {"prompt": "x" * 3000})
    assert "problem a" in refused(capsys, ["--dataset", path, "--out", str(tmp_path / "run")])


def test_flags_beside_resume_are_refused_and_a_used_folder_too(capsys, unbroken):
    assert "--group-size" in refused(capsys, ["--resume", str(unbroken), "--group-size", "8"])
    assert "--resume" in refused(capsys, ["--out", str(unbroken)])


def test_a_full_disk_ends_with_a_sentence_and_the_last_checkpoint_whole(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert main(["--out", str(folder), "--steps", "1", *SMALL]) == 0
    before = weights(folder, 1)
    capsys.readouterr()

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    assert main(["--resume", str(folder), "--steps", "2"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert "No space left" in err[-1] and err[-1].startswith("train.py: ") and "--resume" in err[-1]
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000001"]
    assert all(torch.equal(before[k], v) for k, v in weights(folder, 1).items())


def test_too_little_disk_is_refused_before_training(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    assert "GiB free" in refused(capsys, ["--out", str(tmp_path / "run")])


# ---------------------------------------------------------------- parts

def test_old_checkpoints_go_and_the_newest_stay(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    model, tokenizer = random_model(), byte_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, model, tokenizer, optimizer, step, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


def test_cut_log_keeps_whole_lines_of_earlier_steps(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    cut_log(path, 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_defaults_are_the_embedded_ones_only_with_the_tiny_model():
    run, config, _ = settings_of([])
    assert (run["dataset"], config.learning_rate) == ("tiny", train.EMBEDDED["learning_rate"])
    run, config, _ = settings_of(["--model", "allenai/OLMo-2-1124-7B-Instruct"])
    assert (run["dataset"], config.learning_rate, config.beta, config.clip_eps) == ("KodCode/KodCode-V1", 1e-6, 0.04, 0.2)


def test_help_has_a_line_for_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for action in train.build_parser()._actions:
        assert action.help and action.option_strings[-1] in text


def test_filtered_sampling_is_warned_of(capsys):
    for flags, said in (([], ""), (["--top-k", "5"], "warning: --top-k"), (["--top-p", "0.9"], "warning: --top-k")):
        warn_of_filters(settings_of(flags)[1])
        assert capsys.readouterr().err.startswith(said) and bool(said) == bool(flags)


def test_G35_a_run_that_cannot_learn_says_so(capsys):
    warned = set()
    metrics = {"truncated_share": 1.0, "flat_groups": 1.0, "infra": 0, "nodes": 4}
    warn(metrics, warned)
    warn(metrics, warned)
    said = capsys.readouterr().err
    assert said.count("--max-new-tokens") == 1 and said.count("flat") == 1 and len(warned) == 2


def test_the_table_of_scores():
    assert final_table([("before", [30.0, 35.5]), ("after", [50.25, 70.0])]).splitlines() == [
        "held-out pass@1  Iter-1   Iter-2 ", "before             30.0    35.5", "after              50.2    70.0"]


def test_curves_without_matplotlib_are_one_sentence(unbroken, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    draw_curves(unbroken)
    assert "pip install matplotlib" in capsys.readouterr().err


def test_check_replicas_without_processes_is_silent():
    assert check_replicas(random_model()) is None
