"""Rows of public data sets as Problems: KodCode, MBPP, HumanEval, their EvalPlus versions, LiveCodeBench.

    problems = load_benchmark("humaneval")                           # from the Hub
    problems = load_benchmark("livecodebench", data="test6.jsonl", difficulty="hard")

Tests with public=True may be shown to a solver: HumanEval's docstring examples, MBPP's first assert, LiveCodeBench's public
tests. Leaves out: EvalPlus's own files of inputs without a test script (their expected values come from running the
reference; the Hub's rows hold them), and LiveCodeBench's other tasks than code generation. LiveCodeBench's private tests stay
decoded in memory, many GB for all of v6: narrow it by dates, difficulty or limit where that is too much.
"""
import ast
import base64
import doctest
import io
import json
import pickle
import re
import sys
import zlib
from datetime import date
from pathlib import Path

from problems import (ANSWER_FORMAT, FUNCTION, TINY, BadInput, Problem, Test, defined_names, hub_rows, one_line, own_problem, parse,
                      read_rows, to_problems)

# Examples of HumanEval's docstrings that contradict its tests: shown as feedback, they would make right programs wrong.
FALSE_EXAMPLES = {"median([-10, 4, 6, 1000, 10, 20])", "sort_array([1, 5, 2, 3, 4])", "sort_array([-2, -3, -4, -5, -6])",
                  "tri(1)", "tri(4)", 'bf("Earth", "Mercury")'}
MAX_TEST_BYTES = 2**30  # of one LiveCodeBench row, unpacked


def fenced(code):
    return f"```python\n{code}\n```"


def plain_lines(text):
    """text with Unix line ends, without blank ends."""
    return text.replace("\r\n", "\n").strip()


# ---------------------------------------------------------------- KodCode

def kodcode_problem(row):
    """KodCode: one pytest Test per test function. The prompt declares what the tests use, since the question often does not."""
    question, code = row["question"].strip(), row["test"] if row.get("test_code") is None else row["test_code"]
    wanted = declarations(row.get("solution") or "", code)
    entry = next((name for name, text in wanted.items() if not text.startswith("class")), next(iter(wanted), ""))
    tree = parse(question)
    if wanted and tree and set(wanted) <= defined_names(tree):  # style "complete": the question is the function to fill in
        prompt, starter = f"Complete this program.\n\n{fenced(question)}", question
    else:
        shown = fenced("\n\n".join(sorted(wanted.values(), key=lambda text: not text.startswith("class"))))
        prompt = f"{question}\n\nThe program must define:\n{shown}" if wanted else question
        starter = wanted.get(entry, "").partition("\n")[0]
    code = f"from solution import *\n{code}"  # many files do not import what they test, or lean on the solution's own imports
    tests = [Test("pytest", part) for part in split_pytest(code)] if "test" in code else []
    return Problem(str(row["question_id"]), f"{prompt}\n\n{ANSWER_FORMAT}", tests, starter, entry, "kodcode",
                   str(row.get("gpt_difficulty") or ""), row.get("solution") or "")


def declarations(solution, test_code):
    """{name: "def name(args):\n    ..."} of the solution's functions and classes that the tests name; imported ones first."""
    tree = parse(solution)
    nodes = {n.name: n for n in tree.body if isinstance(n, FUNCTION + (ast.ClassDef,))} if tree else {}
    imported = " ".join(re.findall(r"^from solution import (.+)$", test_code, re.M))
    used = dict.fromkeys(re.findall(r"\w+", imported) + re.findall(r"\w+", test_code))
    return {name: ast.unparse(ast.fix_missing_locations(hollow(nodes[name]))) for name in used if name in nodes}


def hollow(node):
    """A function, or a class with its methods, with `...` for every body and without decorators."""
    methods = [hollow(n) for n in node.body if isinstance(n, FUNCTION)] if isinstance(node, ast.ClassDef) else []
    changed = {"decorator_list": [], "body": methods or [ast.Expr(ast.Constant(...))]}
    return type(node)(**dict(ast.iter_fields(node)) | changed)


def split_pytest(code):
    """A test file as one file per test function, so that the reward is a fraction; [code] where the functions lean on each other."""
    tree = parse(code)
    tests = [n for n in tree.body if isinstance(n, FUNCTION) and n.name.startswith("test")] if tree else []
    guards = [n for n in tree.body if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)] if tree else []
    names = {n.name for n in tests}
    others = [top for top in tree.body if top not in guards] if tree else []
    leans = any(isinstance(n, ast.Name) and n.id in names for top in others for n in ast.walk(top))
    if len(tests) < 2 or len(names) < len(tests) or leans or any(n.startswith("Test") for n in defined_names(tree)):
        return [code]
    lines = code.split("\n")
    spans = [range(min(part.lineno for part in [n, *getattr(n, "decorator_list", [])]) - 1, n.end_lineno) for n in tests + guards]
    taken = {i for span in spans for i in span}
    shared = "\n".join(line for i, line in enumerate(lines) if i not in taken).strip("\n")
    return ["\n".join([shared, "", "", *(lines[i] for i in span), ""]) for span in spans[:len(tests)]]


# ---------------------------------------------------------------- MBPP

def mbpp_problem(row):
    """MBPP, full ("text", "test_setup_code") or sanitized ("prompt", "test_imports"), or MBPP+ of the Hub, with its script `test`.

    The first assert is shown in the prompt, so that the function's name is known; the others or the script are hidden.
    """
    need_script(row)
    setup = "\n".join(row.get("test_imports") or []) or row.get("test_setup_code") or ""
    asserts = [plain_lines(f"{setup}\n{line}") for line in row["test_list"]]
    if not asserts:
        raise ValueError("it has no tests")
    wanted = declarations(plain_lines(row.get("code") or ""), row["test_list"][0])
    entry = next((name for name, text in wanted.items() if text.startswith(("def", "async"))), "")
    plus = row.get("test")
    hidden = [plain_lines(f"{setup}\n{plus}")] if plus else asserts[1:]
    tests = [Test("assert", asserts[0])] + [Test("assert", code, public=False) for code in hidden]
    text = plain_lines(row.get("text") or row["prompt"])
    prompt = f"{text}\n\nThe program must pass this test:\n{fenced(asserts[0])}\n\n{ANSWER_FORMAT}"
    number = str(row["task_id"]).removeprefix("Mbpp/")
    return Problem(f"Mbpp/{number}", prompt, tests, wanted.get(entry, "").partition("\n")[0], entry, "mbpp+" if plus else "mbpp",
                   solution=plain_lines(row.get("code") or ""))


def mbpp_test_split(row):
    """An MBPP row as a Problem, None where it belongs to another split than ids 11 to 510."""
    return mbpp_problem(row) if 11 <= int(str(row["task_id"]).removeprefix("Mbpp/")) <= 510 else None


def mbpp_plus_problem(row):
    problem = mbpp_problem(row)
    if problem.source != "mbpp+":
        raise KeyError("test")
    return problem


# ---------------------------------------------------------------- HumanEval

def humaneval_problem(row):
    """HumanEval or HumanEval+ (the Hub's rows): the docstring's examples are shown, the official check judges."""
    need_script(row)
    prompt, entry = row["prompt"], row["entry_point"]
    tests = [Test("assert", code) for code in docstring_asserts(prompt, entry)]
    tests.append(Test("check", row["test"], entry_point=entry, public=False))
    text = f"Complete this program.\n\n{fenced(prompt.strip())}\n\n{ANSWER_FORMAT}"
    return Problem(row["task_id"], text, tests, prompt, entry, "humaneval", solution=prompt + (row.get("canonical_solution") or ""))


def docstring_asserts(program, entry):
    """The examples in the docstring of function `entry`, as assert statements: `>>> call` / value, and lines like `call == value`.

    Only plain values are taken, and calls with plain arguments: `is_happy(abcd) => True` would be a NameError.
    """
    tree = parse(program)
    function = next((n for n in (tree.body if tree else []) if getattr(n, "name", "") == entry), None)
    text = ast.get_docstring(function) or "" if function else ""
    try:
        pairs = [(e.source, e.want) for e in doctest.DocTestParser().get_examples(text)]
    except ValueError:  # examples that are none
        pairs = []
    pairs += re.findall(rf"(?<![\w.])({entry}\(.*\))\s*(?:# *)?(?:==>|=>|->|➞|==|=|returns)\s*(.+)", text)
    pairs = [(call.strip(), re.sub(r"\s+#.*", "", value).strip()) for call, value in pairs]
    return [f"assert {call} == {value}" for call, value in dict(pairs).items()
            if call not in FALSE_EXAMPLES and is_plain_call(call) and is_literal(value)]


def is_plain_call(text):
    """Whether text is one call, on plain values or on other such calls."""
    tree = parse(text)
    call = tree.body[0].value if tree and len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) else None
    functions = {n.func.id for n in ast.walk(call) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} if call else set()
    return isinstance(call, ast.Call) and {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} <= functions


def is_literal(text):
    """Whether text is a plain Python value."""
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def need_script(row):
    """Raises ValueError for a row of EvalPlus's own files, which hold inputs and no expected values."""
    if "base_input" in row and not row.get("test"):
        raise ValueError("it holds EvalPlus inputs without a test script; take the rows of evalplus/humanevalplus or evalplus/mbppplus")


# ---------------------------------------------------------------- LiveCodeBench

def livecodebench_problem(row, public_only=False):
    """LiveCodeBench, code generation. public_only (bool) lets rows pass that carry no private tests."""
    starter, name = row["starter_code"], as_json(row["metadata"]).get("func_name", "")
    tests = [livecodebench_test(t, name, True) for t in as_json(row["public_test_cases"])]
    if private := row.get("private_test_cases"):
        tests += [livecodebench_test(t, name, False) for t in decode_tests(private)]
    elif not public_only:
        raise ValueError("it has no private tests; judge it by its public ones with --public-only")
    how = f"Complete this program:\n{fenced(starter.rstrip())}" if starter else (
        "The program reads its input from standard input and prints the answer to standard output.")
    prompt = f"{plain_lines(row['question_content'])}\n\n{how}\n\n{ANSWER_FORMAT}"
    return Problem(str(row["question_id"]), prompt, tests, starter, name, "livecodebench", row["difficulty"])


def livecodebench_test(test, name, public):
    """One {"input", "output", "testtype"} as a Test; `name` (str) is the function that functional tests call."""
    if test["testtype"] == "stdin":
        return Test("stdin", input=test["input"], expected=test["output"], public=public)
    if test["testtype"] != "functional" or not name:
        raise ValueError(f"a test has testtype {test['testtype']!r} and the function {name!r}; known are stdin, and functional with a name")
    return Test("call", input=test["input"], expected=test["output"], entry_point=name, public=public)


def as_json(value):
    return json.loads(value) if isinstance(value, str) else value


def decode_tests(text):
    """Private tests, a list of dicts: JSON, or JSON in a pickled string, compressed, in base64. Raises ValueError for anything else."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        unpack = zlib.decompressobj()
        data = unpack.decompress(base64.b64decode(text, validate=True), MAX_TEST_BYTES)
        if not unpack.eof:
            raise ValueError("cut, or too long")
        return json.loads(StringUnpickler(io.BytesIO(data)).string())
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"its private tests cannot be decoded ({one_line(error)})") from None


class StringUnpickler(pickle.Unpickler):
    """Unpickles a string and nothing else: a pickle that names any class or function, and so could run code, is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}")

    def string(self):
        value = self.load()
        if not isinstance(value, str):
            raise pickle.UnpicklingError(f"the pickle holds a {type(value).__name__}, not a string")
        return value


def in_window(row, start, end, difficulty):
    """Whether a row's contest date is within [start, end] and its difficulty the wanted one; None does not restrict."""
    day = date.fromisoformat(row["contest_date"][:10])
    return (not start or day >= start) and (not end or day <= end) and difficulty in (None, row["difficulty"])


# ---------------------------------------------------------------- all of them

FORMATS = {  # name: (fields that tell it, converter); the first that fits
    "our own": ({"prompt", "tests"}, own_problem),
    "KodCode": ({"question", "question_id"}, kodcode_problem),
    "LiveCodeBench": ({"question_content", "public_test_cases"}, livecodebench_problem),
    "MBPP": ({"task_id", "test_list"}, mbpp_problem),
    "HumanEval": ({"entry_point", "prompt"}, humaneval_problem),
}
BENCHMARKS = {  # name: (data set of the Hub, config, converter)
    "humaneval": ("openai/openai_humaneval", None, humaneval_problem),
    "humaneval+": ("evalplus/humanevalplus", None, humaneval_problem),
    "mbpp": ("google-research-datasets/mbpp", "full", mbpp_test_split),
    "mbpp+": ("evalplus/mbppplus", None, mbpp_plus_problem),
    "mbpp-sanitized": ("google-research-datasets/mbpp", "sanitized", mbpp_test_split),
    "livecodebench": ("livecodebench/code_generation_lite", None, livecodebench_problem),
    "tiny": ("", None, own_problem),  # in this repository
}
RELEASES = {f"v{n}": [f"test{i if i > 1 else ''}.jsonl" for i in range(1, n + 1)] for n in range(1, 7)}


def convert_any(row):
    """The Problem of a row whose format is told by its fields. Raises ValueError for an unknown one, KeyError for a missing field."""
    found = set(row) if isinstance(row, dict) else set()
    for needed, convert in FORMATS.values():
        if needed <= found:
            return convert(row)
    raise ValueError(f"its fields ({', '.join(map(str, sorted(found))) or 'none'}) are those of no known format: " +
                     "; ".join(f"{name} has {', '.join(sorted(needed))}" for name, (needed, _) in FORMATS.items()))


def load_benchmark(name, data=None, limit=None, release="v6", start_date=None, end_date=None, difficulty=None, public_only=False,
                   skip_bad_rows=False, skipped=None):
    """The problems (list) of a benchmark to evaluate on, in its own order.

    name (str): one of BENCHMARKS; MBPP, sanitized too, means the test split, ids 11 to 510. data (path): a file of its rows, or
    LiveCodeBench's folder of files; None asks the Hub. limit (int): the first so many. For LiveCodeBench: release v1 ... v6 (all
    problems up to then), dates "YYYY-MM-DD" of the first and last contest, difficulty easy | medium | hard, public_only (bool) for
    rows without private tests. skip_bad_rows (bool) leaves out rows that cannot be read: they are named on stderr and added to
    the list `skipped`. Raises BadInput.
    """
    if name not in BENCHMARKS:
        raise BadInput(f"there is no benchmark {name}; choose one of {', '.join(BENCHMARKS)}")
    if limit is not None and limit < 1:
        raise BadInput(f"the limit of problems is {limit}; it must be at least 1")
    convert = BENCHMARKS[name][2]
    if name == "livecodebench":
        window = (as_date(start_date), as_date(end_date), as_difficulty(difficulty))
        convert = lambda row: livecodebench_problem(row, public_only) if in_window(row, *window) else None
    rows, where = benchmark_rows(name, data, release)
    problems, bad = to_problems(rows, where, convert, limit, skip_bad_rows)
    for sentence in bad:
        print(f"skipped {sentence}", file=sys.stderr)
    if skipped is not None:
        skipped += bad
    return problems


def benchmark_rows(name, data, release):
    """(rows of a benchmark, the name of their source); rows as read_rows yields them."""
    files, where = [data] if data else [], str(data or name)
    if name == "livecodebench" and not (data and Path(data).is_file()):
        if release.removeprefix("release_") not in RELEASES:
            raise BadInput(f"there is no release {release} of LiveCodeBench; choose one of {', '.join(RELEASES)}")
        names = RELEASES[release.removeprefix("release_")]
        files = [Path(data) / name for name in names] if data else [hub_file(BENCHMARKS[name][0], file) for file in names]
    elif name == "tiny" and not data:
        files = [TINY / "heldout.jsonl"]
    if files:
        return (row for file in files for row in read_rows(file)), where
    source, config, _ = BENCHMARKS[name]
    return ((f"{source}, row {i}", row) for i, row in enumerate(hub_rows(source, config, "test"), 1)), source


def hub_file(repository, name):
    """The local path of a data set's file, downloaded once. Raises BadInput."""
    from huggingface_hub import hf_hub_download  # comes with transformers
    try:
        return hf_hub_download(repository, name, repo_type="dataset")
    except Exception as error:  # the client raises many kinds
        raise BadInput(f"cannot get {name} of {repository} from the Hub ({one_line(error)}); give its file or folder, or check the "
                       "network") from None


def as_date(text):
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise BadInput(f"{text} is no date; write it as 2024-08-01") from None


def as_difficulty(text):
    if text and text.lower() not in ("easy", "medium", "hard"):
        raise BadInput(f"there is no difficulty {text}; choose easy, medium or hard")
    return text.lower() if text else None
