"""study.py: its statistics by hand, its page, and that finished runs are kept."""
import json
from pathlib import Path

import pytest

import study

FLAGS = ["--method", "grpo", "--group-size", "2", "--prompts-per-step", "2", "--eval-problems", "2", "--eval-every", "1", "--workers", "1",
         "--max-programs", "5", "--steps", "9"]


def run_of(*scores, **more):
    return dict(before=[10.0, 20.0, 20.0], iter=list(scores), steps=4, programs=100, tokens=3000, rollout=2.0, optimisation=1.0,
                curve=[[0, 10, 20, 20], [100, *scores]]) | more


def test_an_interval_is_students():  # mean 4, standard deviation 2, three seeds: 4.303 * 2 / sqrt(3)
    assert study.interval([2, 4, 6]) == (4, pytest.approx(4.9687, abs=1e-3))


def test_differences_are_paired_by_seed():
    results = {"a": [run_of(1, 2, 50), run_of(1, 2, 70)], "b": [run_of(1, 2, 40), run_of(1, 2, 60)]}
    assert study.difference(results, "a", "b", 3) == (10, 0)
    assert study.difference(results, "a", "b", 1) == (0, 0)


@pytest.mark.parametrize("mean, half, sign, word", [
    (5, 4, 1, "repeated"), (-5, 4, 1, "contradicted"), (3, 4, 1, "not repeated"), (-5, 4, -1, "repeated"), (5, 4, -1, "contradicted"),
    (1, 1.5, 0, "repeated"), (-1, 2.5, 0, "undecided"), (-9, 2, 0, "contradicted")])
def test_a_claim_is_held_against_the_interval(mean, half, sign, word):
    assert f"**{word}" in study.claim("x", mean, half, sign)


def test_the_best_rate_is_the_lowest_of_equals():
    assert study.best_rate({"1e-3": 60.0, "1e-4": 60.0, "3e-4": 59.0}) == "1e-4"
    assert study.best_rate({"1e-3": 60.5, "1e-4": 60.0}) == "1e-3"


def test_the_page_has_every_arm_and_the_best_rate_in_bold(tmp_path):
    arms = [*study.METHODS, *study.VARIANTS, *study.ABLATIONS]
    results = {arm: [run_of(30.0, 40.0, 50.0 + i), run_of(30.0, 40.0, 52.0 + i)] for i, arm in enumerate(arms)}
    setting = dict(programs=100, seeds=range(2), rates=("1e-4", "1e-3"), quick=False)
    text = study.page(results, {method: {"1e-4": 40.0, "1e-3": 45.0} for method in study.METHODS}, setting)
    assert "| GRPO | 30.0 ± 0.0 | 40.0 ± 0.0 | 51.0 ± 12.7 | 4 | 100 | 3 | 2 | 1 |" in text and "| Base | 10.0 | 20.0 | 20.0 |" in text
    assert "MURPHY is above compute-matched GRPO at Iter-3: **repeated**; +5.0 ± 0.0 points." in text  # sixth arm, and the first
    assert text.count("| 40.0 | **45.0** |") == len(study.METHODS) and all(f"| {arm} |" in text for arm in arms)
    study.draw(results, tmp_path)
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("curves.png", "arms.png"))


def test_a_finished_run_is_kept_and_another_is_refused(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("of a killed run")
    first = study.run_once(folder, FLAGS)
    assert first["programs"] == 8 and first["steps"] == 2 and [p[0] for p in first["curve"]] == [0, 4, 8]  # 4 a step, until 5
    assert first["curve"][0][1:] == first["before"] and first["curve"][-1][1:] == first["iter"]
    assert first["tokens"] == sum(json.loads(line)["tokens"] for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert not (folder / "checkpoints").exists()
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    assert study.run_once(folder, FLAGS) == first and (folder / "metrics.jsonl").stat().st_mtime_ns == before
    with pytest.raises(study.BadInput, match="other settings"):
        study.run_once(folder, FLAGS + ["--seed", "1"])


def test_a_run_that_was_stopped_or_failed_is_no_result(tmp_path):
    with pytest.raises(study.BadInput, match="stopped before its end"):
        study.run_once(tmp_path / "a", [*FLAGS[:-1], "1"])
    with pytest.raises(study.BadInput, match="ended with code 2: train.py: --group-size is 1"):
        study.run_once(tmp_path / "b", [*FLAGS, "--group-size", "1"])
    assert not list(Path(tmp_path).glob("*/result.json"))


def test_every_arm_is_an_own_folder_and_flags_that_train_py_takes():
    from train import settings_of
    arms = study.METHODS | study.VARIANTS | study.ABLATIONS
    assert len({study.folder_name((arm, 0)) for arm in arms}) == len(arms)
    configs = [settings_of([*flags, *study.SHARED, "--max-programs", str(study.PROGRAMS)])[1] for flags in arms.values()]
    assert len(set(configs)) == len(arms)


def test_bad_flags_are_told_in_one_sentence(capsys):
    assert study.main(["--workers", "0"]) == 2 and "--workers is 0" in capsys.readouterr().err
