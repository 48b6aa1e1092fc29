"""Rows of public data sets, written here in each exact format, and the real ones of ../shared where they are there."""
import base64
import json
import pickle
import sys
import types
import zlib
from collections import Counter
from pathlib import Path

import pytest

import benchmarks
from benchmarks import (convert_any, decode_tests, docstring_asserts, humaneval_problem, kodcode_problem, livecodebench_problem,
                        load_benchmark, mbpp_problem, split_pytest)
from problems import BadInput, Test, extract_code, load_problems, read_rows

DATA = Path(__file__).parents[2] / "shared/data"
needs = lambda name: pytest.mark.skipif(not (DATA / name).exists(), reason="needs the data in ../shared")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- KodCode

KODCODE = {"style": "instruct", "question_id": "A_1_I", "question": "Write a function to add one.", "gpt_difficulty": "easy",
           "solution": "import math\ndef add_one(x, step=1):\n    return math.floor(x) + step",
           "test": "from solution import add_one\nimport pytest\n\ndef test_a():\n    assert add_one(1) == 2\n\n"
                   "@pytest.mark.parametrize('x', [2, 3])\ndef test_b(x):\n    assert add_one(x) == x + 1\n"}


def test_kodcode_row():
    problem = kodcode_problem(KODCODE)
    assert problem.prompt == ("Write a function to add one.\n\nThe program must define:\n```python\ndef add_one(x, step=1):\n    ...\n```\n\n"
                              "Put the whole program in one code block: ```python ... ```.")
    assert (problem.task_id, problem.entry_point, problem.starter_code) == ("A_1_I", "add_one", "def add_one(x, step=1):")
    assert (problem.source, problem.difficulty) == ("kodcode", "easy")
    shared = "from solution import *\nfrom solution import add_one\nimport pytest"
    assert [t.kind for t in problem.tests] == ["pytest"] * 2 and all(t.code.startswith(shared) and t.public for t in problem.tests)
    assert ["test_a" in t.code for t in problem.tests] == [True, False]
    assert "parametrize" in problem.tests[1].code and "test_b" in problem.tests[1].code


def test_kodcode_question_that_is_the_program_to_complete():
    question = 'def add_one(x: int) -> int:\n    """Add one."""'
    problem = kodcode_problem(KODCODE | {"question": question})
    assert problem.prompt.startswith(f"Complete this program.\n\n```python\n{question}\n```") and problem.starter_code == question
    assert extract_code("    return x + 1", problem.starter_code) == question + "\n    return x + 1"


def test_kodcode_older_field_names_and_classes():
    row = {k: v for k, v in KODCODE.items() if k != "test"} | {
        "solution": "def f(tree: 'Tree'):\n    return tree.size\n\n@dec\nclass Tree:\n    def __init__(self, size=0):\n        self.size = size",
        "test_code": "def test_a():\n    assert f(Tree(1)) == 1\n"}
    problem = kodcode_problem(row)
    assert "class Tree:\n\n    def __init__(self, size=0):\n        ...\n\ndef f(tree: 'Tree'):\n    ..." in problem.prompt
    assert problem.entry_point == "f" and problem.tests == [Test("pytest", "from solution import *\n" + row["test_code"])]


@pytest.mark.parametrize("code, parts", [
    ("def test_a():\n    assert f(1)\ndef test_b():\n    assert f(2)\n", 2),
    ("def test_a():\n    assert f(1)\n", 1),
    ("x = 3\n# why\ndef test_a():\n    assert f(x)\n\ndef helper():\n    return 1\n\ndef test_b():\n    assert f(helper())\n\n"
     "if __name__ == '__main__':\n    test_a()\n    test_b()\n", 2),
    ("def test_a():\n    return 1\ndef test_b():\n    assert test_a()\n", 1),      # one leans on the other
    ("def test_a():\n    assert f(1)\ndef test_a():\n    assert f(2)\n", 1),        # the second replaces the first
    ("class TestF:\n    def test_a(self):\n        pass\ndef test_b():\n    pass\ndef test_c():\n    pass\n", 1),
    ("def test_a(:\n", 1),
])
def test_test_files_are_split_where_that_is_safe(code, parts):
    split = split_pytest(code)
    assert len(split) == parts and (parts > 1 or split == [code])
    if parts > 1:
        for part in split:
            namespace = {"f": lambda x: x, "__name__": "t"}
            exec(part, namespace)
            (test,) = [v for k, v in namespace.items() if k.startswith("test")]
            test()


@needs("kodcode_sample.jsonl")
def test_real_kodcode_references_pass_every_split_test(monkeypatch, capsys):
    failed, rows = Counter(), [row for _, row in read_rows(DATA / "kodcode_sample.jsonl")]
    assert sum(len(kodcode_problem(row).tests) for row in rows) == 818  # every test function
    for row in rows[::3]:
        monkeypatch.setitem(sys.modules, "solution", module := types.ModuleType("solution"))
        exec(row["solution"], module.__dict__)
        for test in kodcode_problem(row).tests:
            namespace = {"__name__": "t"}
            try:
                exec(test.code, namespace)
                [run() for name, run in namespace.items() if name.startswith("test") and getattr(run, "__module__", "") == "t"]
            except ModuleNotFoundError as error:
                failed[error.name] += 1
    assert set(failed) <= {"scipy", "pytest", "numpy"}


# ---------------------------------------------------------------- MBPP

MBPP = {"task_id": 11, "text": "Write a function to add one.\r\n", "code": "def inc(x):\r\n  return x + 1\r\ndef other():\r\n  pass",
        "test_setup_code": "", "test_list": ["assert inc(1) == 2", "assert inc(2) == 3 "], "challenge_test_list": []}


def test_mbpp_row():
    problem = mbpp_problem(MBPP)
    assert problem.prompt == ("Write a function to add one.\n\nThe program must pass this test:\n```python\nassert inc(1) == 2\n```\n\n"
                              "Put the whole program in one code block: ```python ... ```.")
    assert problem.tests == [Test("assert", "assert inc(1) == 2"), Test("assert", "assert inc(2) == 3", public=False)]
    assert (problem.task_id, problem.entry_point, problem.starter_code) == ("Mbpp/11", "inc", "def inc(x):")


@pytest.mark.parametrize("row, setup", [
    (MBPP | {"test_setup_code": "root = Node(1) \r\nroot.left = Node(2)"}, "root = Node(1) \nroot.left = Node(2)"),
    ({"task_id": 2, "prompt": "Add.", "code": MBPP["code"], "test_list": MBPP["test_list"], "test_imports": ["import math", "import re"]},
     "import math\nimport re"),
])
def test_mbpp_setup_runs_with_the_tests_after_the_program(row, setup):
    problem = mbpp_problem(row)
    assert [t.code for t in problem.tests] == [f"{setup}\nassert inc(1) == 2", f"{setup}\nassert inc(2) == 3"]
    assert problem.tests[0].code in problem.prompt


def test_mbpp_plus_row_of_the_hub():
    script = "import numpy as np\ninputs = [[1], [2]]\nresults = [2, 3]\nfor inp, exp in zip(inputs, results):\n    assert inc(*inp) == exp\n"
    problem = mbpp_problem({"task_id": 2, "code": "def inc(x):\n  return x + 1", "prompt": "Add one.", "source_file": "a",
                            "test_imports": [], "test_list": MBPP["test_list"], "test": script})
    assert problem.source == "mbpp+" and problem.tests == [Test("assert", "assert inc(1) == 2"), Test("assert", script.strip(), public=False)]


@needs("mbpp.jsonl")
@pytest.mark.filterwarnings("ignore:invalid escape")
@pytest.mark.parametrize("name, file, count, all_count", [("mbpp", "mbpp.jsonl", 500, 974), ("mbpp-sanitized", "sanitized-mbpp.json", 257, 427)])
def test_real_mbpp(name, file, count, all_count):
    problems = load_benchmark(name, DATA / file)
    assert len(problems) == count and all(11 <= int(p.task_id.removeprefix("Mbpp/")) <= 510 for p in problems)
    rows, problems = [row for _, row in read_rows(DATA / file)], load_problems(DATA / file, split="heldout")
    assert len(problems) == all_count and all(p.starter_code and p.entry_point in p.prompt for p in problems)
    assert all([t.public for t in p.tests] == [True] + [False] * (len(p.tests) - 1) for p in problems)
    for row, problem in list(zip(rows, problems))[:60]:
        exec("\n".join([extract_code(f"```python\n{row['code']}\n```", problem.starter_code), *(t.code for t in problem.tests)]), {})


# ---------------------------------------------------------------- HumanEval

HUMANEVAL = {"task_id": "HumanEval/0", "entry_point": "f", "canonical_solution": "    return h(x)\n",
             "prompt": 'from typing import List\n\n\ndef h(x):\n    return x + 1\n\n\ndef f(x: int) -> int:\n'
                       '    """Add one.\n    >>> f(1)\n    2\n    >>> f(y)\n    4\n    """\n',
             "test": "\n\ndef check(candidate):\n    assert candidate(1) == 2\n"}


def test_humaneval_row():
    problem = humaneval_problem(HUMANEVAL)
    assert problem.prompt == (f"Complete this program.\n\n```python\n{HUMANEVAL['prompt'].strip()}\n```\n\n"
                              "Put the whole program in one code block: ```python ... ```.")
    assert problem.tests == [Test("assert", "assert f(1) == 2"), Test("check", HUMANEVAL["test"], entry_point="f", public=False)]
    assert problem.starter_code == HUMANEVAL["prompt"] and problem.source == "humaneval"
    code = extract_code("```python\ndef f(x):\n    return h(x)\n```", problem.starter_code)
    assert code.startswith("from typing import List\n\n\ndef h(x)") and code.endswith("def f(x):\n    return h(x)")


@pytest.mark.parametrize("example, found", [
    (">>> f(1)\n2", ["assert f(1) == 2"]),
    (">>> f([1, 'a'])\n(None, {'b': 1.5})", ["assert f([1, 'a']) == (None, {'b': 1.5})"]),
    (">>> f(f(1))\n3", ["assert f(f(1)) == 3"]),
    (">>> f(1) == 2", ["assert f(1) == 2"]),
    ("f(1) => 2", ["assert f(1) == 2"]),
    ("* f(1) -> [2, (3)]", ["assert f(1) == [2, (3)]"]),
    ("f(1) ➞ 'a' # why", ["assert f(1) == 'a'"]),
    ("f(1)   # returns -2", ["assert f(1) == -2"]),
    ("f((1, 2), g=3) = 4\nf(2) == 5", ["assert f((1, 2), g=3) == 4", "assert f(2) == 5"]),
    ("f(1) -> 3 - 1 = 2", []),          # no plain value
    ("f(abc) => True", []),             # no plain argument
    (">>> f(1)\n[1, 2, ...", []),
    (">>>f(1)\n2", []),                 # doctest refuses it
    ("g(1) == 2", []),
    (">>> x = 1\n>>> f(x)\n2", []),
])
def test_docstring_examples(example, found):
    body = example.replace("\n", "\n    ")
    assert docstring_asserts(f'def f(x, g=0):\n    """Does.\n\n    {body}\n    """\n', "f") == found


@needs("HumanEval.jsonl.gz")
def test_real_humaneval_references_pass_what_is_shown_and_what_judges():
    problems = load_benchmark("humaneval", DATA / "HumanEval.jsonl.gz")
    assert len(problems) == 164 and sum(len(p.tests) > 1 for p in problems) == 135 and sum(len(p.tests) - 1 for p in problems) == 369
    for (_, row), problem in zip(read_rows(DATA / "HumanEval.jsonl.gz"), problems):
        whole = row["prompt"][row["prompt"].rindex(f"def {row['entry_point']}"):] + row["canonical_solution"]
        for answer in (row["canonical_solution"], row["canonical_solution"].strip(), f"```python\n{whole}```"):
            namespace = {}
            exec(extract_code(answer, problem.starter_code), namespace)
            for test in problem.tests[:-1]:
                exec(test.code, namespace)
        if row["task_id"] != "HumanEval/32":  # a slow one
            exec(problem.tests[-1].code, namespace)
            namespace["check"](namespace[row["entry_point"]])


# ---------------------------------------------------------------- LiveCodeBench

PRIVATE = [{"input": "3\n", "output": "4\n", "testtype": "stdin"}]
STDIN = {"question_title": "A", "question_content": "Add one to the number.\n", "platform": "atcoder", "question_id": "abc_a", "contest_id": "abc",
         "contest_date": "2024-08-10T00:00:00", "starter_code": "", "difficulty": "easy", "metadata": "{}",
         "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]), "private_test_cases": json.dumps(PRIVATE)}
CALL = STDIN | {"platform": "leetcode", "question_id": "99", "difficulty": "hard", "contest_date": "2024-09-01T08:00:00",
                "starter_code": "class Solution:\n    def inc(self, x: int, y: List[int]) -> int:\n        ", "metadata": '{"func_name": "inc"}',
                "public_test_cases": json.dumps([{"input": "1\n[2]", "output": "2", "testtype": "functional"}]),
                "private_test_cases": json.dumps([{"input": "3\n[]", "output": "4", "testtype": "functional"}])}


def pack(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_livecodebench_stdin_row():
    problem = livecodebench_problem(STDIN)
    assert problem.prompt == ("Add one to the number.\n\nThe program reads its input from standard input and prints the answer to standard output."
                              "\n\nPut the whole program in one code block: ```python ... ```.")
    assert problem.tests == [Test("stdin", input="1\n", expected="2\n"), Test("stdin", input="3\n", expected="4\n", public=False)]
    assert (problem.task_id, problem.difficulty, problem.source) == ("abc_a", "easy", "livecodebench")


def test_livecodebench_functional_row():
    problem = livecodebench_problem(CALL)
    assert "Complete this program:\n```python\nclass Solution:\n    def inc(self, x: int, y: List[int]) -> int:\n```" in problem.prompt
    assert problem.tests == [Test("call", input="1\n[2]", expected="2", entry_point="inc"),
                             Test("call", input="3\n[]", expected="4", entry_point="inc", public=False)]
    assert extract_code("```python\nreturn x + 1\n```", problem.starter_code).endswith(":\n        return x + 1")


@pytest.mark.parametrize("encode", [json.dumps, lambda tests: pack(json.dumps(tests)), lambda tests: tests,
                                    lambda tests: base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests), protocol=0))).decode()])
def test_every_encoding_of_private_tests(encode):
    assert decode_tests(encode(PRIVATE)) == PRIVATE
    assert livecodebench_problem(STDIN | {"private_test_cases": encode(PRIVATE)}) == livecodebench_problem(STDIN)


class Hostile:
    def __reduce__(self):
        return (exec, ("import builtins; builtins.hacked = True",))


@pytest.mark.parametrize("text, reason", [
    (pack(Hostile()), "exec"),                       # would run code when loaded
    (pack([Hostile()]), "exec"),
    (pack(PRIVATE), "a list, not a string"),
    (pack(b"[]"), "bytes|codecs"),
    (pack("no JSON"), "cannot be decoded"),
    ("no base64!", "cannot be decoded"),
    (base64.b64encode(b"not compressed").decode(), "cannot be decoded"),
    (base64.b64encode(zlib.compress(b"no pickle")).decode(), "cannot be decoded"),
    (pack(json.dumps(PRIVATE))[:-40] + "====", "cannot be decoded"),
    (base64.b64encode(zlib.compress(pickle.dumps("[" * 1000))[:-9]).decode(), "cut"),
])
def test_anything_but_a_string_is_refused(text, reason):
    import builtins
    with pytest.raises(ValueError, match=reason):
        decode_tests(text)
    assert not hasattr(builtins, "hacked")


def test_private_tests_that_unpack_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(benchmarks, "MAX_TEST_BYTES", 1000)
    with pytest.raises(ValueError, match="too long"):
        decode_tests(pack(json.dumps(["x" * 10**7])))


@pytest.mark.parametrize("options, ids", [
    ({}, ["abc_a", "99"]),
    ({"difficulty": "hard"}, ["99"]),
    ({"difficulty": "Easy"}, ["abc_a"]),
    ({"start_date": "2024-08-11"}, ["99"]),
    ({"end_date": "2024-08-10"}, ["abc_a"]),          # both ends belong to the window
    ({"start_date": "2024-08-10", "end_date": "2024-09-01"}, ["abc_a", "99"]),
    ({"limit": 1}, ["abc_a"]),
])
def test_livecodebench_selection(tmp_path, options, ids):
    assert [p.task_id for p in load_benchmark("livecodebench", write(tmp_path / "a.jsonl", [STDIN, CALL]), **options)] == ids


@pytest.mark.parametrize("release, files", [("v1", 1), ("v6", 6), ("release_v3", 3)])
def test_a_release_is_all_files_up_to_it(tmp_path, monkeypatch, release, files):
    for i, name in enumerate(benchmarks.RELEASES["v6"]):
        write(tmp_path / name, [STDIN | {"question_id": str(i)}])
    assert benchmarks.RELEASES["v6"] == ["test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"]
    assert [p.task_id for p in load_benchmark("livecodebench", tmp_path, release=release)] == [str(i) for i in range(files)]
    monkeypatch.setattr(benchmarks, "hub_file", lambda repository, name: tmp_path / name)
    assert len(load_benchmark("livecodebench", release=release)) == files


def test_rows_without_private_tests_need_public_only(tmp_path):
    public = {k: v for k, v in STDIN.items() if k != "private_test_cases"}
    path = write(tmp_path / "a.jsonl", [public, CALL])
    with pytest.raises(BadInput, match="row 1: it has no private tests.*--public-only"):
        load_benchmark("livecodebench", path)
    first, second = load_benchmark("livecodebench", path, public_only=True)
    assert [t.public for t in first.tests] == [True] and [t.public for t in second.tests] == [True, False]


@needs("livecodebench_public.jsonl")
def test_real_livecodebench():
    problems = load_benchmark("livecodebench", DATA / "livecodebench_public.jsonl", public_only=True)
    assert len(problems) == 400 and Counter(t.kind for p in problems for t in p.tests) == {"stdin": 604, "call": 439}
    assert Counter(p.difficulty for p in problems) == {"easy": 142, "medium": 168, "hard": 90}
    (problem,) = load_benchmark("livecodebench", DATA / "livecodebench_full_row.jsonl")
    assert [t.public for t in problem.tests] == [True] + [False] * 4 and problem.tests[1].input == "1\nabc\n"


# ---------------------------------------------------------------- all of them

def test_bad_rows_are_named_counted_and_skipped_on_request(tmp_path, capsys):
    rows = [STDIN, STDIN | {"question_id": "b", "private_test_cases": "?"}, {k: v for k, v in CALL.items() if k != "contest_date"},
            CALL | {"metadata": "{}"}, STDIN, CALL | {"question_id": "c", "public_test_cases": "["}, CALL]
    path, skipped = write(tmp_path / "a.jsonl", rows), []
    with pytest.raises(BadInput, match="row 2: its private tests cannot be decoded"):
        load_benchmark("livecodebench", path)
    assert [p.task_id for p in load_benchmark("livecodebench", path, skip_bad_rows=True, skipped=skipped)] == ["abc_a", "99"]
    reasons = ["private tests", "field 'contest_date' is missing", "'functional' and the function ''", "task id abc_a", "Expecting"]
    assert len(skipped) == 5 and all(reason in sentence for reason, sentence in zip(reasons, skipped))
    assert [s.split(", row ")[1][0] for s in skipped] == list("23456") and capsys.readouterr().err.count("skipped ") == 5


@pytest.mark.parametrize("name, options, reason", [
    ("humanevil", {}, "no benchmark humanevil; choose one of humaneval"),
    ("livecodebench", {"release": "v9"}, "no release v9"),
    ("livecodebench", {"start_date": "May"}, "May is no date"),
    ("livecodebench", {"difficulty": "huge"}, "no difficulty huge"),
    ("livecodebench", {"start_date": "2030-01-01"}, "no problem that is wanted"),
    ("humaneval", {"limit": 0}, "at least 1"),
])
def test_bad_choices_are_one_sentence(tmp_path, name, options, reason):
    path = write(tmp_path / "test.jsonl", [STDIN])
    with pytest.raises(BadInput, match=reason):
        load_benchmark(name, tmp_path if "release" in options else path, **options)


def test_inputs_without_a_test_script_say_where_to_find_one(tmp_path):
    row = {"task_id": "HumanEval/0", "prompt": "", "entry_point": "f", "base_input": [[1]], "plus_input": [[2]]}
    path = write(tmp_path / "a.jsonl", [row])
    for name in ("humaneval+", "mbpp+"):
        with pytest.raises(BadInput, match="row 1: .*evalplus/humanevalplus"):
            load_benchmark(name, path)
    with pytest.raises(BadInput, match="row 1: .*evalplus/humanevalplus"):
        load_problems(path)


@pytest.mark.parametrize("name, row, missing", [("humaneval", MBPP, "prompt"), ("mbpp", HUMANEVAL | {"task_id": 12}, "test_list"),
                                                ("mbpp+", MBPP, "test"), ("livecodebench", MBPP, "contest_date"), ("tiny", KODCODE, "prompt")])
def test_rows_of_another_benchmark_are_refused(tmp_path, name, row, missing):
    with pytest.raises(BadInput, match=f"row 1: field '{missing}' is missing"):
        load_benchmark(name, write(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize("name, asked", [
    ("humaneval", ("openai/openai_humaneval", None, "test")), ("humaneval+", ("evalplus/humanevalplus", None, "test")),
    ("mbpp", ("google-research-datasets/mbpp", "full", "test")), ("mbpp-sanitized", ("google-research-datasets/mbpp", "sanitized", "test")),
    ("mbpp+", ("evalplus/mbppplus", None, "test")),
])
def test_hub_data_sets(monkeypatch, name, asked):
    calls = []
    row = HUMANEVAL if name.startswith("h") else MBPP | ({"test": "assert inc(1) == 2"} if name == "mbpp+" else {})
    monkeypatch.setattr(benchmarks, "hub_rows", lambda *args: calls.append(args) or [row])
    (problem,) = load_benchmark(name)
    assert calls == [asked] and problem.tests[-1].public is False


def test_a_failed_download_is_one_sentence(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    datasets = pytest.importorskip("datasets")

    def fail(*args, **options):
        raise ConnectionError("no network\nat all")
    monkeypatch.setattr(hub, "hf_hub_download", fail)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    for name in ("livecodebench", "humaneval"):
        with pytest.raises(BadInput, match="from the Hub.*no network.*give") as error:
            load_benchmark(name)
        assert "\n" not in str(error.value)


def test_tiny_is_the_held_out_file(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "TINY", tmp_path)
    write(tmp_path / "heldout.jsonl", [{"task_id": "t", "prompt": "Write f.", "tests": [{"kind": "assert", "code": "assert f(1)"}]}])
    assert [p.task_id for p in load_benchmark("tiny")] == ["t"]


@pytest.mark.parametrize("row", [KODCODE, MBPP, HUMANEVAL, STDIN, CALL], ids=["kodcode", "mbpp", "humaneval", "stdin", "call"])
def test_prompts_have_balanced_fences_and_rows_tell_their_format(row):
    problem = convert_any(row)
    assert problem.prompt.count("```") % 2 == 0 and problem.prompt == problem.prompt.strip()
    assert problem.tests and extract_code("Sorry", problem.starter_code) == ""
