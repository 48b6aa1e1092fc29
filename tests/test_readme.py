"""README: every link into the code points at what it names, the lesson is the program's own, and the examples run."""
import json
import re
from pathlib import Path

import pytest

import credit
import lesson
import rollout

ROOT = Path(__file__).resolve().parents[1]


def test_links_point_at_the_lines_that_define_what_they_name():
    links = re.findall(r"\[`([\w.]+)`\]\(([\w/]+\.py)#L(\d+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 15
    wrong = []
    for name, file, line in links:
        lines = (ROOT / file).read_text().splitlines()
        pattern = rf"\s*(def|class) {re.escape(name)}\b"
        if int(line) > len(lines) or not re.match(pattern, lines[int(line) - 1]):
            right = [i for i, text in enumerate(lines, 1) if re.match(pattern, text)]
            wrong.append(f"{name}: {file}#L{line}, should be #L{right[0] if right else '?'}")
    assert not wrong


def test_files_named_in_tables_exist():
    for target in re.findall(r"\]\(([\w/.]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_lesson_is_what_lesson_py_prints(capsys):
    assert lesson.main([]) == 0
    stages = re.split(r"\n\n?\d\. [^\n]*\n", capsys.readouterr().out)[1:]
    assert len(stages) == 5 and [s.rstrip() for s in stages] == [b.rstrip() for b in blocks("") if b.rstrip() in {s.rstrip() for s in stages}]


@pytest.mark.parametrize("i, run", list(enumerate(["mine", "reward", "credit"])))
def test_the_examples_run_and_do_what_they_say(i, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout, "reward_of", rollout.reward_of)  # put back afterwards
    monkeypatch.setattr(credit, "mars", credit.mars)
    assert len(blocks("python")) == 3
    exec(blocks("python")[i], {"__name__": "example"})
    trees = [json.loads(line) for line in (tmp_path / "runs" / run / "trees.jsonl").read_text().splitlines()]
    for nodes in (tree["nodes"] for tree in trees):
        for n, node in enumerate(nodes):
            below = [child["credit"] for child in nodes if child["parent"] == n]
            if run == "reward":
                ran = all(status in ("passed", "failed") for status in node["status"])
                assert node["reward"] == pytest.approx(ran / 2 + node["status"].count("passed") / len(node["status"]) / 2)
            if run == "credit" and below:
                assert node["credit"] == pytest.approx(max(node["reward"], sum(below) / len(below)))
    assert run != "mine" or (trees[0]["task_id"] == "double" and len(trees[0]["nodes"][0]["status"]) == 2)
