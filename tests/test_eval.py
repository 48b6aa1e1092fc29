"""eval.py: scores, resume, the files it leaves, and comparison. The whole path uses tiny/ and the real executor."""
import json
import subprocess
import sys

import numpy as np
import pytest

import eval as evaluation
from eval import compare, decisive, interval, limits_of, main, pass_at_k, read_lines, score, transcript
from executor import Executor, Limits
from problems import Problem, Test
from rollout import Node, Tree
from common import StubVerdict


# ---------------------------------------------------------------- scores

@pytest.mark.parametrize("n, c, k, wanted", [(1, 1, 1, 1.0), (5, 0, 3, 0.0), (4, 2, 1, 0.5), (4, 2, 2, 1 - 1 / 6), (10, 10, 10, 1.0), (3, 1, 3, 1.0)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_program(n, c, k, wanted):
    from itertools import combinations
    assert pass_at_k(n, c, k) == pytest.approx(wanted)
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(i < c for i in s) for s in combinations(range(n), k)]))


@pytest.mark.parametrize("n, c, k", [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_outside_its_range_is_an_error(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


def test_interval_holds_the_mean_and_narrows_with_more_problems():
    few, many = [0, 1] * 10, [0, 1] * 1000
    assert interval([1.0] * 7) == (1.0, 1.0)
    for values in (few, many):
        low, high = interval(values)
        assert low < 0.5 < high
    assert interval(many)[1] - interval(many)[0] == pytest.approx(2 * 1.96 * 0.5 / 2000 ** 0.5, rel=0.1)
    assert interval(few) == interval(few)


def record(task, solved, difficulty=""):
    attempt = {"reward": 0.0, "truncated": False}
    return {"task_id": task, "difficulty": difficulty, "solved": solved, "chains": [[attempt] for _ in solved]}


def test_scores_by_iteration_by_level_and_pass_at_k():
    records = [record("a", [[False, True], [True, True]], "easy"), record("b", [[False, False], [False, False]], "hard")]
    scores = score(records, 2, 2)
    assert [scores["iterations"][f"Iter-{k}"]["pass@1"] for k in (1, 2)] == [25.0, 50.0]
    assert scores["by_difficulty"]["easy"]["iterations"]["Iter-1"]["pass@1"] == 50.0
    assert scores["by_difficulty"]["hard"]["iterations"]["Iter-2"]["pass@1"] == 0.0
    assert scores["pass@k"] == {"1": 50.0, "2": 50.0}


def test_docstring_examples_are_shown_but_only_the_benchmarks_tests_count():
    tests = [Test("assert", "assert f(1) == 2"), Test("check", "...", public=False)]
    assert decisive(Problem("HumanEval/0", "", tests, source="humaneval")) == [False, True]
    assert decisive(Problem("11", "", tests, source="mbpp")) == [True, True]
    assert decisive(Problem("x", "", tests[:1], source="humaneval")) == [True]


def test_T11_no_hidden_test_is_in_a_transcripts_feedback():
    tests = [Test("assert", "assert f(1) == 2"), Test("assert", "assert f(77) == 7878", public=False)]
    with Executor(1) as executor:
        (verdict,) = executor.run([("def f(x): return x", tests)])
    tree = Tree(Problem("p", "", tests), [Node(-1, 1, 0, [2], "t", "c", False, verdict=verdict, reward=verdict.reward)])
    for feedback, leaks in (("public", False), ("all", True)):
        said = transcript(tree, {"feedback": feedback, "iterations": 1})["chains"][0][0]["feedback"]
        assert "f(1)" in said and ("of 2 tests" in said) == leaks and "7878" not in said
    (verdict,) = [StubVerdict([True, False], public=[True, False])]
    assert "of 1 tests" in verdict.visible().feedback()


def test_limits_leave_livecodebench_its_time():
    assert limits_of("livecodebench").cpu_seconds == 60 and limits_of("humaneval") == limits_of("mbpp") == Limits()


# ---------------------------------------------------------------- a whole evaluation

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "run"
    assert main(["--limit", "6", "--iterations", "2", "--workers", "1", "--out", str(out)]) == 0
    return out


def independent_score(folder):
    """Slow scorer: each program and its asserts in an interpreter of its own."""
    problems = {r["task_id"]: r for r in map(json.loads, open(evaluation.Path(evaluation.__file__).parent / "tiny" / "heldout.jsonl"))}
    right = []
    for sample in read_lines(folder / "samples.jsonl"):
        asserts = "\n".join(t["code"] for t in problems[sample["task_id"]]["tests"])
        run = subprocess.run([sys.executable, "-I", "-c", sample["completion"] + "\n" + asserts], capture_output=True)
        right.append(run.returncode == 0)
    return round(100 * np.mean(right), 2)


def test_samples_scored_by_an_independent_scorer_give_the_same_number(folder):
    results = json.loads((folder / "results.json").read_text())
    assert results["scores"]["problems"] == 6 and results["settings"]["feedback"] == "public"
    assert independent_score(folder) == results["scores"]["iterations"]["Iter-2"]["pass@1"]
    assert {"python", "torch", "transformers"} == set(results["versions"])


def test_transcripts_hold_every_attempt(folder):
    for record in read_lines(folder / "transcripts.jsonl"):
        (chain,), (solved,) = record["chains"], record["solved"]
        assert 1 <= len(chain) <= 2 and len(solved) == 2
        assert all("def" in a["code"] or not a["code"] for a in chain) and all(a["feedback"].startswith("Passed") for a in chain)
        assert solved[-1] == all(s == "passed" for s in chain[-1]["status"])


def test_a_killed_evaluation_goes_on_and_repeats_nothing(folder, monkeypatch, capsys):
    before = {name: (folder / name).read_text() for name in ("transcripts.jsonl", "samples.jsonl")}
    lines = before["transcripts.jsonl"].splitlines(keepends=True)
    (folder / "transcripts.jsonl").write_text("".join(lines[:4]) + lines[4][:30])  # cut while writing the fifth
    (folder / "results.json").unlink()
    grown = []
    monkeypatch.setattr(evaluation, "grow_trees", lambda m, t, block, *a, f=evaluation.grow_trees, **k: grown.extend(block) or f(m, t, block, *a, **k))
    assert main(["--limit", "6", "--iterations", "2", "--workers", "1", "--out", str(folder)]) == 0
    assert len(grown) == 2 and {name: (folder / name).read_text() for name in before} == before
    assert main(["--limit", "5", "--iterations", "2", "--out", str(folder)]) == 2
    assert "other settings" in capsys.readouterr().err


def test_compare_prints_the_papers_layout_and_paired_differences(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    results = json.loads((folder / "results.json").read_text())
    records = read_lines(folder / "transcripts.jsonl")
    for r in records:
        r["solved"] = [[True, True]]
    results["scores"] = score(records, 2, 1)
    (other / "results.json").write_text(json.dumps(results))
    (other / "transcripts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    first = json.loads((folder / "results.json").read_text())["scores"]["iterations"]["Iter-1"]["pass@1"]
    text = compare([str(folder), str(other)])
    assert f"Iter-1 {100 - first:+.2f}" in text and "over 6 problems" in text and "100.00" in text
    results["settings"]["feedback"] = "all"
    (other / "results.json").write_text(json.dumps(results))
    assert "not comparable" in compare([str(folder), str(other)])


def test_reflexion_keeps_a_note_on_the_failure(tmp_path):
    out = tmp_path / "r"
    assert main(["--limit", "3", "--iterations", "2", "--scaffold", "reflexion", "--workers", "1", "--out", str(out)]) == 0
    for record in read_lines(out / "transcripts.jsonl"):
        (chain,) = record["chains"]
        assert all(isinstance(a["reflection"], str) for a in chain) and chain[-1]["reflection"] == ""
        assert len(chain) == 1 or chain[0]["reflection"]


@pytest.mark.parametrize("argv, words", [
    (["--iterations", "0"], "--iterations"), (["--samples", "2", "--temperature", "0"], "--samples"), (["--temperature", "-1"], "--temperature"),
    (["--compare", "/no/run"], "no finished evaluation"), (["--benchmark", "mbpp", "--data", "/no/file.jsonl"], "/no/file.jsonl"),
    (["--model", "/no/model", "--limit", "1"], "no model folder")])
def test_bad_input_is_one_sentence_and_code_2(argv, words, capsys):
    assert main(argv) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("eval.py: ") and words in said[0]
