"""Chat messages, code taken out of answers, and loading of problems. X.. names public reports of others' failures."""
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import problems
from benchmarks import convert_any
from problems import (FIX_INSTRUCTION, BadInput, Problem, Test, extract_code, load_problems, messages, read_rows, strip_reasoning,
                      to_problems)

SHARED = Path(__file__).parents[2] / "shared"
F = "def f(x):\n    return x + 1"
OLD = "def f(x):\n    return x - 1 if x > 100 else x"  # longer than F: a draft
PROMPT = 'from typing import List\n\ndef f(xs: List[int]) -> int:\n    """Sum the list."""\n'
SOLUTION = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "


def block(code, tag="python", fence="```"):
    return f"{fence}{tag}\n{code}\n{fence}\n"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------- messages

@pytest.mark.parametrize("attempt, feedback, roles, last", [
    ("", "", ["user"], "Write f."),
    ("code", "1 of 2 failed", ["user", "assistant", "user"], f"1 of 2 failed\n\n{FIX_INSTRUCTION}"),
    ("", "no code found", ["user", "assistant", "user"], f"no code found\n\n{FIX_INSTRUCTION}"),
    ("code", "", ["user", "assistant", "user"], FIX_INSTRUCTION),
])
def test_messages_of_a_turn(attempt, feedback, roles, last):
    chat = messages(Problem("p", "Write f."), attempt, feedback)
    assert [m["role"] for m in chat] == roles and chat[-1]["content"] == last
    assert len(chat) == 1 or chat[1]["content"] == attempt


@pytest.mark.parametrize("text, left", [
    ("<think>a</think>b", "b"),
    ("a</think>b", "b"),  # the opening tag stood in the generation prompt
    ("<think>a", ""),
    ("b<think>a", "b"),
    ("<think>a</think>b<think>c</think>d", "bd"),
    ("a</think>b<think>c</think>d", "bd"),
    ("<think>a<think>b</think>c</think>d", "d"),
    ("plain", "plain"),
])
def test_reasoning_is_removed(text, left):
    assert strip_reasoning(text) == left
    assert "a" not in messages(Problem("p", ""), "<think>a</think>b", "x")[1]["content"]


# ---------------------------------------------------------------- extract_code

@pytest.mark.parametrize("case", lines(SHARED / "cases/extract_code.jsonl"), ids=lambda c: c["id"])
def test_shared_cases(case):
    assert extract_code(case["response"], case.get("starter_code", "")).strip("\n") == case["code"].strip("\n")


@pytest.mark.parametrize("case", [c for c in lines(SHARED / "cases/public_reports.jsonl") if c["area"] == "extract"],
                         ids=lambda c: c["id"])
def test_public_reports(case):
    code, expected = extract_code(case["input"]["text"], case["input"].get("prompt", "")), case["expected"]
    if "tests" not in expected:
        assert code == ""
        return
    try:
        exec("\n".join([code, *expected["tests"]]), {})
        verdict = "pass"
    except (AssertionError, NameError):
        verdict = "fail"
    assert verdict == expected["verdict"]


OWN_CASES = {
    # which block
    "draft, then the answer, no starter": (block(OLD) + "No:\n" + block(F), "", F),
    "longer draft of the asked-for function": (block(OLD) + "No:\n" + block(F), "def f(x):", F),
    "longer example of use": (block(F) + block("print(f(1))\nprint(f(2))\nprint(f(3))"), "", F),
    "output as a block": (block(F) + "prints\n" + block("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", ""), "", F),
    "name must match whole": (block(F) + block("def f_test():\n    assert f(1) == 2"), "def f(x):", F),
    "the longest that parses": (block("x = 1\ny = 2\nprint(x + y)") + block("z = 3"), "", "x = 1\ny = 2\nprint(x + y)"),
    "none parses: the last": (block("x = = 1") + block("y = = 2"), "", "y = = 2"),
    "asked-for function with a syntax error": (block("def f(x):\n    return (x") + block("print(f(1))"), "def f(x):",
                                               "def f(x):\n    return (x"),
    "the prompt repeated as a block of its own": (block(F) + block('def f(x):\n    """Add."""'), "def f(x):", F),
    "a name bound by assignment": (block("f = lambda x: x") + block("f(2)"), "def f(x):", "f = lambda x: x"),
    "JSON after the code": (block(F) + block('{"f": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}', "json"), "", F),
    "helper in a block of its own is not joined": (block("def g(x):\n    return x") + block(F), "def f(x):", F),
    # fences
    "fence after prose": ("Answer: ```python\nx = f(1)\n```", "", "x = f(1)"),
    "list item": ("- ```py\n  def f(x):\n      return x + 1\n  ```", "", F),
    "tab-indented fence": ("\t```python\n\tdef f(x):\n\t    return x + 1\n\t```", "", F),
    "attributes": (block(F, '{.python title="a"}'), "", F),
    "inner shorter fence does not close": ("````python\ns = '''\n```\n'''\n````", "", "s = '''\n```\n'''"),
    "tilde inside back-ticks": ("```python\ns = '''\n~~~\n'''\n```", "", "s = '''\n~~~\n'''"),
    "fence in a docstring": (block('def f(x):\n    """Add.\n    ```\n    f(1)\n    ```\n    """\n    return x + 1'), "",
                             'def f(x):\n    """Add.\n    ```\n    f(1)\n    ```\n    """\n    return x + 1'),
    "Python in a Markdown block of the same fence": ("```markdown\nText\n" + block(F) + "```", "", F),
    "fence opened twice": ("```python\n" + block(F), "", F),
    "stray closing fence": (F + "\n```", "", F),
    "stray closing fence, then prose": (F + "\n```\nThis adds one.", "", F),
    "empty block": ("```python\n```\n" + block(F), "", F),
    "only an empty block": ("```python\n```", "", ""),
    "tag forgotten": ("```def f(x):\n    return x + 1\n```", "", F),
    "cut in the middle": ("```python\ndef f(x):\n    return (x", "", "def f(x):\n    return (x"),
    "quotes that never close": ("```python\ns = '''\n```\nprose", "", "s = '''"),
    # no fence
    "fence in the docstring of unfenced code": ('def f(x):\n    """Add.\n    ```python\n    print(f(1))\n    ```\n    """\n    return x + 1', "",
                                                'def f(x):\n    """Add.\n    ```python\n    print(f(1))\n    ```\n    """\n    return x + 1'),
    "indented prose with a starter": ("  Sorry", "def f(x):", ""),
    "one word is prose": ("Sorry", "", ""),
    "a number is prose": ("42", "", ""),
    "an annotation is prose": ("Note: impossible", "", ""),
    "prose with a starter": ("Sorry", "def f(x):", ""),
    "a call is code": ("print(1)", "", "print(1)"),
    "comments are no code": ("# nothing", "", ""),
    "empty": ("", "def f(x):", ""),
    "BEGIN and DONE": ("[BEGIN]\n'def f(x):\n    return x + 1'\n[DONE]\nmore", "", F),
    # noise
    "CRLF": (block(F).replace("\n", "\r\n"), "", F),
    "special token in the block": ("```python\n" + F + "<|im_end|>\n", "", F),
    "special token first": ("<|im_start|>\n" + block(F) + "<|im_end|>", "", F),
    "end of sentence": (F + "</s>", "", F),
    "DeepSeek's end of sentence": (F + "<｜end▁of▁sentence｜>", "", F),
    "NBSP in a string stays": (block("s = '\xa0'"), "", "s = '\xa0'"),
    "ideographic space": (block("def f(x):\n\u3000\u3000return x + 1"), "", "def f(x):\n  return x + 1"),
    "lone surrogate": (block("s = '\ud800'"), "", "s = '?'"),
    "NUL": (block("x = 1\0"), "", "x = 1\0"),
    "main guard": (block("def main():\n    print(1)\n\nif __name__ == '__main__':\n    main()"), "",
                   "def main():\n    print(1)\n\nif __name__ == '__main__':\n    main()"),
    # reasoning
    "two thoughts": ("<think>a</think>" + block(F) + "<think>" + block("bad = 1") + "</think>", "", F),
    "unclosed thought after a closed one": ("<think>a</think><think>" + block(F), "", ""),
    # starter code
    "class asked for": (block("class Solution:\n    def add(self, a, b):\n        return a + b") + block("Solution().add(1, 2)"), SOLUTION,
                        "class Solution:\n    def add(self, a, b):\n        return a + b"),
    "body of a method": (block("return a + b"), SOLUTION, SOLUTION.rstrip() + "\n        return a + b"),
    "method without its class": (block("def add(self, a, b):\n    return a + b"), SOLUTION,
                                 "def add(self, a, b):\n    return a + b\n\n\nclass Solution:\n    add = add"),
    "wrong name is no body": (block("def add_one(x):\n    return x + 1"), "def f(x):\n", "def add_one(x):\n    return x + 1"),
    "future import stays first": (block("from __future__ import annotations\ndef f(xs):\n    return sum(xs)"), PROMPT,
                                  "from __future__ import annotations\nfrom typing import List\n\n\ndef f(xs):\n    return sum(xs)"),
    "comments before the function are left out": (block(F), "# class Node: ...\ndef f(x):", F),
}


@pytest.mark.parametrize("name", OWN_CASES)
def test_own_cases(name):
    response, starter, code = OWN_CASES[name]
    assert extract_code(response, starter) == code


@pytest.mark.parametrize("answer", [
    "    return sum(xs)",                                           # X19
    "return sum(xs)",
    "  return sum(xs)",                                             # X25: any indentation but the right one
    "\treturn sum(xs)",
    "            return sum(xs)",
    "total = 0\n    for x in xs:\n        total += x\n    return total",  # the first line was stripped
    "total = 0\nfor x in xs:\n    total += x\nreturn total",
    "    if not xs:\n        return 0\n    return xs[0] + f(xs[1:])",
    "    return h(xs)\n\ndef h(a):\n    return sum(a)",             # X24
    "return h(xs)\n\ndef h(a):\n    return sum(a)",
    PROMPT + "    return sum(xs)",                                  # X21: the prompt is repeated
    PROMPT + "return sum(xs)",
    PROMPT.rstrip() + "\n\n\n    return sum(xs)",
    "def f(xs: List[int]) -> int:\n    return sum(xs)",             # X20: needs the import of the prompt
    "def h(a: List):\n    return sum(a)\n\ndef f(xs):\n    return h(xs)",
    "from typing import List\ndef f(xs: List[int]):\n    return sum(xs)",
])
@pytest.mark.parametrize("form", ["{}", "```python\n{}\n```", "Here:\n```\n{}\n```\nIt sums.", "```py\n{}", "{}\n<|endoftext|>Human: next"])
def test_answer_completes_the_prompt(answer, form):
    namespace = {}
    exec(extract_code(form.format(answer), PROMPT), namespace)
    assert namespace["f"]([1, 2]) == 3 and namespace["f"]([]) == 0


@pytest.mark.parametrize("unit", ["`", "```\n", "```python\n", "```python\n(\n```\n", '```python\n"""\n```\n', "~~~`", "(", "-", "a.", "not ", "'",
                                  "<think>", "</think>", "</s> ", "<|a", "[BEGIN]", "\0", "\ud800", " ", "\n", "return x\n", "\"\"\"'''\n"])
def test_hostile_answers_are_linear_and_never_raise(unit):
    text = (unit * 100_000)[:100_000]
    start = time.process_time()
    for starter in ("", PROMPT, text):
        extract_code(text, starter).encode()
    assert time.process_time() - start < 10  # a quadratic scan would take minutes
    assert extract_code(None) == ""


# ---------------------------------------------------------------- loading

def own(i=1, **changed):
    return {"task_id": f"t{i}", "prompt": "Write f.", "tests": [{"kind": "assert", "code": "assert f(1) == 2"}]} | changed


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_own_fields(tmp_path):
    row = own(starter_code="def f(x):", entry_point="f", source="me", difficulty="easy",
              tests=[{"kind": "stdin", "input": "1\n", "expected": "2\n", "public": False}])
    (problem,) = load_problems(str(write(tmp_path / "a.jsonl", [row])))
    assert problem == Problem("t1", "Write f.", [Test("stdin", input="1\n", expected="2\n", public=False)], "def f(x):", "f", "me", "easy")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".list.json", ".jsonl.gz", ".json.gz", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    rows, path = [own(i) for i in range(3)], tmp_path / f"a{suffix}"
    text = json.dumps(rows, indent=1) if "list" in suffix or suffix == ".json.gz" else "\n\n".join(map(json.dumps, rows))
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    elif suffix.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    assert [row for _, row in read_rows(path)] == rows
    assert [p.task_id for p in load_problems(path, split="heldout")] == ["t0", "t1", "t2"]


def test_training_problems_are_drawn_by_seed_and_held_out_ones_are_the_first(tmp_path):
    path = write(tmp_path / "a.jsonl", [own(i) for i in range(50)])
    draw = lambda **options: [p.task_id for p in load_problems(path, limit=10, **options)]
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert len(set(draw())) == 10 and sorted(p.task_id for p in load_problems(path)) == sorted(f"t{i}" for i in range(50))
    assert draw(split="heldout") == [f"t{i}" for i in range(10)]


def test_tiny_is_read_from_the_repository(tmp_path, monkeypatch):
    write(tmp_path / "train.jsonl", [own(1)])
    write(tmp_path / "heldout.jsonl", [own(2)])
    monkeypatch.setattr(problems, "TINY", tmp_path)
    assert [load_problems("tiny", split=s)[0].task_id for s in ("train", "heldout")] == ["t1", "t2"]


def test_rows_of_the_hub_are_drawn_before_they_are_converted(monkeypatch):
    converted = []

    class Rows(list):
        def __getitem__(self, i):
            converted.append(i)
            return super().__getitem__(i)

    def hub_rows(name, split):
        asked.append((name, split))
        return Rows(own(i) for i in range(1000))

    asked = []
    monkeypatch.setattr(problems, "hub_rows", hub_rows)
    assert len(load_problems("some/data", limit=5, seed=3)) == len(converted) == 5
    load_problems("some/data", limit=5, split="heldout")
    assert asked == [("some/data", "train"), ("some/data", "test")]


BAD_ROWS = {
    "no tests": (own(tests=[]), "has no tests"),
    "missing field": ({"task_id": "a", "tests": [{"kind": "assert"}], "prompt_text": ""}, "no known format"),
    "missing task_id": ({"prompt": "Write f.", "tests": [{"kind": "assert"}]}, "field 'task_id' is missing"),
    "unknown kind": (own(tests=[{"kind": "magic"}]), "kind is one of assert"),
    "unknown field of a test": (own(tests=[{"kind": "assert", "sauce": 1}]), "sauce"),
    "test without kind": (own(tests=[{"code": "assert f(1)"}]), "field 'kind' is missing"),
    "tests is no list": (own(tests=3), "int"),
    "prompt is no text": (own(prompt=None), "prompt"),
    "no object": ([1, 2], "no known format"),
    "duplicate id": (own(0), "task id t0 is also that of"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_named(tmp_path, name):
    row, reason = BAD_ROWS[name]
    path = write(tmp_path / "bad.jsonl", [own(0), row])
    with pytest.raises(BadInput) as error:
        load_problems(path)
    text = str(error.value)
    assert text.startswith(f"{path}, row 2: ") and reason in text and "\n" not in text
    good, skipped = to_problems(read_rows(path), "bad", convert_any, skip_bad_rows=True)
    assert [p.task_id for p in good] == ["t0"] and len(skipped) == 1 and skipped[0].startswith(f"{path}, row 2: ")


@pytest.mark.parametrize("name, content, reason", [
    ("empty.jsonl", b"", "holds no problem"),
    ("blank.jsonl", b"\n\n", "holds no problem"),
    ("list.json", b"[]", "holds no problem"),
    ("broken.jsonl", json.dumps(own()).encode() + b"\n{\"task_id\":", "row 2, is not JSON"),
    ("bytes.jsonl", b"\xff\xfe\xff", "is not JSON"),
    ("not.gz", b"plain", "cannot read"),
    ("cut.jsonl.gz", gzip.compress(json.dumps(own()).encode())[:-12], "cannot read"),
    ("missing.jsonl", None, "cannot read"),
    ("fake.parquet", b"PAR0", "cannot read"),
])
def test_unreadable_files_are_one_sentence(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput) as error:
        load_problems(tmp_path / name)
    assert str(tmp_path / name) in str(error.value) and reason in str(error.value) and "\n" not in str(error.value)


def test_a_folder_is_no_data_set(tmp_path):
    with pytest.raises(BadInput, match="cannot read"):
        load_problems(tmp_path)


@pytest.mark.parametrize("source, package", [("some/data", "datasets"), ("a.parquet", "pyarrow")])
def test_missing_packages_are_one_sentence(tmp_path, monkeypatch, source, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(BadInput, match="pip install datasets"):
        load_problems(tmp_path / source if package == "pyarrow" else source)


def test_importing_needs_no_packages():
    code = "import sys, problems, benchmarks; assert not {'datasets', 'pyarrow', 'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
