"""Problems: what is asked of the model, what judges its programs, the chat messages of a turn, and the code of an answer.

    problems = load_problems("tiny")                      # or a file, or a Hub data set: see load_problems
    chat = messages(problems[0], attempt, feedback)       # for tokenizer.apply_chat_template
    code = extract_code(answer, problems[0].starter_code) # "" when the answer holds no code

The fields of KodCode, MBPP and the other data sets are read in benchmarks.py. Leaves out: running anything (executor.py),
and code without a fence between prose (such an answer counts as no code).
"""
import ast
import functools
import gzip
import json
import random
import re
import textwrap
import warnings
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path

FIX_INSTRUCTION = "Write the corrected program."
ANSWER_FORMAT = "Put the whole program in one code block: ```python ... ```."
KINDS = ("assert", "check", "pytest", "stdin", "call")
TINY = Path(__file__).parent / "tiny"


class BadInput(ValueError):
    """Input that the user has to change: one sentence says what is wrong, where, and what to do. Command lines exit with 2."""


@dataclass(frozen=True)
class Test:
    """One test of a program. Which fields are used depends on `kind`:

    assert: `code` is one or more statements run in the program's namespace.
    check:  `code` defines `check(candidate)`; it is called with the function `entry_point`.
    pytest: `code` holds test_* functions; the program is importable as `solution`.
    stdin:  the program runs as __main__ with `input` on fd 0; its output is compared with `expected`.
    call:   `entry_point` (a function or a method of `Solution`) is called with the JSON values in
            `input`, one a line, one line per argument; the result is compared with the JSON `expected`.
    public: the test may be shown to the model (in feedback).
    """
    __test__ = False  # not a pytest class, whatever its name suggests
    kind: str
    code: str = ""
    input: str = ""
    expected: str = ""
    entry_point: str = ""
    public: bool = True


@dataclass(frozen=True)
class Problem:
    """A task. `prompt` is the whole text of the first user message; `solution` is a right program, where the data have one, and never shown."""
    task_id: str
    prompt: str
    tests: list[Test] = field(default_factory=list)
    starter_code: str = ""
    entry_point: str = ""
    source: str = ""
    difficulty: str = ""
    solution: str = ""


# ---------------------------------------------------------------- messages

def messages(problem, attempt="", feedback="", instruction=FIX_INSTRUCTION):
    """The chat of a turn, as list[{"role", "content"}]: the task; with an attempt (str) or feedback (str), those too.

    Roles alternate whatever is missing. Reasoning of the attempt is not repeated.
    """
    chat = [{"role": "user", "content": problem.prompt}]
    if attempt or feedback:
        chat.append({"role": "assistant", "content": strip_reasoning(attempt).strip()})
        chat.append({"role": "user", "content": f"{feedback.strip()}\n\n{instruction}".strip()})
    return chat


def strip_reasoning(text):
    """text (str) without <think>...</think>, also where the opening tag stood in the prompt or the closing one is missing."""
    kept = ""
    *closed, last = text.split("</think>")
    for piece in closed:
        before, tag, _ = piece.partition("<think>")
        kept = kept + before if tag else ""  # no opening tag: all before the closing one was reasoning
    return kept + last.partition("<think>")[0]


# ---------------------------------------------------------------- code of an answer

# Possessive quantifiers (++, {3,}+): no backtracking, so hostile lines cost no more than others.
FENCE = re.compile(r"(?P<before>[ \t]*+)(?P<ticks>`{3,}+|~{3,}+)(?P<info>[^`]*+)$")
FENCE_AFTER_PROSE = re.compile(r"(?<![`~])(?P<ticks>`{3,}+|~{3,}+)[ \t]*+(?P<info>\{?\.?py\w*+\}?)[ \t]*+$", re.I)
SPECIAL_TOKEN = re.compile(r"<[|｜][a-z0-9_▁]{3,}+[|｜]>|</s>\s*+\Z")  # <|im_end|>, <|endoftext|>, <｜end▁of▁sentence｜>
DEFINITION = re.compile(r"^([ \t]*+)(?:async[ \t]+)?(def|class)[ \t]+(\w+)", re.M)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
ODD_SPACES = {ord(c): " " for c in "\xa0\u2002\u2003\u2009\u202f\u3000"} | {ord(c): None for c in "\u200b\ufeff"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its text, and whether its tag says Python, or nothing."""
    code: str
    python: bool


def extract_code(response, starter_code=""):
    """The program in an answer (str), "" when there is none. Never raises.

    starter_code (str) is what the answer may continue or leave out: a signature, or a HumanEval prompt. Its last top-level
    function or class is the asked-for one. A whole-function answer is put after what stands before that function, a bare
    body after all of it. Of several blocks: the last that defines what was asked for, else the longest that parses, else the last.
    """
    text, starter = clean(response or ""), clean(starter_code or "").rstrip()
    program = as_program(plain_spaces(text), starter)  # a fence outside a string is no Python, so this tells whether there is one
    if not is_code(parse(program)):
        blocks = list(fenced_blocks(text.split("\n")))
        program = as_program(choose(blocks, starter), starter) if blocks else ""
    if not is_code(parse(program)):
        before = re.split(r"^[ \t]*+(?:```|~~~)", unquote(text), maxsplit=1, flags=re.M)[0]  # of a stray closing fence
        before = as_program(before, starter)
        program = before if is_code(parse(before)) else program
    return program.strip("\n")


def clean(text):
    """Plain line ends, no lone surrogates, no reasoning, nothing from the first special token on (leading ones aside)."""
    text = text.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"\A(?:\s*+<\|[a-z_]++\|>)+", "", strip_reasoning(text).lstrip("\ufeff"))
    return SPECIAL_TOKEN.split(text, maxsplit=1)[0]


def plain_spaces(code):
    """code with plain spaces for exotic ones, where that is what keeps it from parsing (in a string they may be meant)."""
    return code if code.isascii() or parse(code) else code.translate(ODD_SPACES)


def unquote(text):
    """The inside of [BEGIN] ... [DONE] and of quotes around the whole answer, as few-shot prompts teach them."""
    inside = re.search(r"\[BEGIN\](.*?)(?:\[DONE\]|\Z)", text, re.S)
    text = inside[1] if inside else text
    quoted = re.fullmatch(r"\s*+('''|\"\"\"|['\"])(.*)\1\s*+", text, re.S)
    return quoted[2] if quoted else text


def fenced_blocks(lines, depth=0):
    """The non-empty Blocks in lines, in order; those inside a block that is no Python (a Markdown document) come after it."""
    i = 0
    while i < len(lines):
        fence, i = FENCE.match(lines[i]) or FENCE_AFTER_PROSE.search(lines[i]), i + 1
        if not fence:
            continue
        info = fence["info"].strip()
        end = closing(lines, i, fence["ticks"], python := not info or bool(re.match(r"\{?\.?py", info, re.I)))
        body, i = lines[i:end], end + 1
        if re.match(r"(?:def|class|import|from)\s|@\w", info):  # the tag was forgotten: no part of the program is eaten
            body, python = [info] + body, True
        indent = fence.groupdict().get("before")
        code = textwrap.dedent("\n".join(body)) if indent is None else "\n".join(line.removeprefix(indent) for line in body)
        if code.strip():
            yield Block(code := plain_spaces(code), python)
        if depth < 3 and ("```" in code or "~~~" in code) and not parse(code):
            yield from fenced_blocks(body, depth + 1)


def closing(lines, start, ticks, python):
    """The index of the line that closes a block opened before `start`, len(lines) if none does."""
    first, inside = len(lines), ""
    for i in range(start, len(lines)):
        line = lines[i].strip()
        if line.startswith(ticks) and not line.strip(ticks[0]):
            first = min(first, i)
            if not inside:
                return i
        elif python:  # a fence within a docstring does not close
            for quotes in re.findall(r"\"\"\"|'''", line):
                inside = "" if inside == quotes else inside or quotes
    return first


def choose(blocks, starter):
    """The code of the block that is the answer: see extract_code."""
    codes = [b.code for b in blocks if b.python] or [b.code for b in blocks]
    name, named = asked_for(starter), re.compile(rf"^[ \t]*(?:async )?(?:def|class)\s+{asked_for(starter)}\b", re.M)
    if name:
        for answers in (lambda code: defines(parse(code), name), lambda code: defines(parse(as_program(code, starter)), name),
                        named.search):
            for code in reversed(codes):
                if answers(code):
                    return code
    return longest_program(codes) or codes[-1]


def longest_program(codes):
    """The longest code that parses ("" if none does), or the last that defines the same names: an earlier one is its draft.

    Code that only uses what another block defines is an example of use.
    """
    defined = {code: defined_names(tree) for code in codes if is_code(tree := parse(code))}
    used = {code: {n.id for n in ast.walk(parse(code)) if isinstance(n, ast.Name)} for code, names in defined.items() if not names}
    everything = set().union(*defined.values())
    programs = [code for code in defined if not used.get(code, set()) & everything]
    best = max(reversed(programs), key=len, default="")
    return next((code for code in reversed(programs) if defined[best] and defined[code] >= defined[best]), best)


# ---------------------------------------------------------------- code and starter code to a program

@functools.lru_cache(maxsize=4)  # choosing a block asks for the same trees again
def parse(code):
    """The syntax tree of code, None if it is no Python. Never raises. Not to be changed: it is shared."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a string of the model is not our warning
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def is_code(tree):
    """Whether a tree does something: `Sorry`, `42` and `Note: none` parse, but are prose."""
    def acts(node):
        if isinstance(node, ast.Expr):
            return any(isinstance(n, ast.Call) for n in ast.walk(node))
        return not isinstance(node, ast.AnnAssign) or node.value is not None
    return tree is not None and any(acts(node) for node in tree.body)


def defined_names(tree):
    """Names of the functions and classes that stand at the top level of a tree."""
    return {n.name for n in tree.body if isinstance(n, FUNCTION + (ast.ClassDef,))}


def defines(tree, name):
    """Whether a tree gives `name` a meaning at the top level; a function that is only a docstring or `pass` does not count."""
    def is_stub(node):
        return all(isinstance(n, ast.Pass) or isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
                   or isinstance(n, FUNCTION) and is_stub(n) for n in node.body)
    for node in reversed(tree.body if tree else []):
        if getattr(node, "name", "") == name:
            return not is_stub(node)
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == name for t in node.targets):
            return True
    return False


def returns_at_top(tree):
    """Whether a `return` stands outside any function: the code is the body of one."""
    nodes = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Return):
            return True
        if not isinstance(node, FUNCTION + (ast.expr,)):
            nodes.extend(ast.iter_child_nodes(node))
    return False


def asked_for(starter):
    """The name of the last top-level function or class of the starter code, "" if it has none."""
    return next((m[3] for m in reversed(list(DEFINITION.finditer(starter))) if not m[1]), "")


def as_program(code, starter):
    """code completed by the starter code, where it needs it; code itself where it does not, or where nothing fits."""
    code = code.strip("\n")
    whole = textwrap.dedent(code)
    tree, name = parse(whole), asked_for(starter)
    if not name:
        return whole
    if defines(tree, name) and not returns_at_top(tree):
        return after_head(starter, whole)
    method = list(DEFINITION.finditer(starter))[-1][3]
    if method != name and defines(tree, method):  # a method without its class
        return f"{whole}\n\n\nclass {name}:\n    {method} = {method}"
    if tree is None or is_code(tree) and (code[:1].isspace() or returns_at_top(tree)):
        for body in bodies(code, starter):
            program = f"{starter}\n{body}"
            if (tree := parse(program)) and not returns_at_top(tree):
                return program
    return whole


def after_head(starter, program):
    """A whole-function answer after what stands before the function in the starter code: imports, helpers."""
    head = starter[:[m for m in DEFINITION.finditer(starter) if not m[1]][-1].start()].strip()
    tree = parse(head)
    if head in program or tree is None or not tree.body:
        return program
    future = re.findall(r"^from __future__ import .*$", program, re.M)  # must stay first
    return "\n".join(future + [head, "", "", re.sub(r"^from __future__ import .*\n", "", program, flags=re.M)])


def bodies(code, starter):
    """Ways to read code as the body of the starter's function: as it is, first line indented anew, all of it, both."""
    if code.lstrip().startswith(starter.strip()):  # the prompt was repeated
        code = code.lstrip()[len(starter.strip()):].strip("\n")
    outer, last = list(DEFINITION.finditer(starter))[-1][1], re.match(r"[ \t]*", starter.split("\n")[-1])[0]
    indent = last if len(last) > len(outer) else outer + "    "
    first, _, rest = code.partition("\n")
    margin = min((re.match(r"[ \t]*", line)[0] for line in rest.split("\n") if line.strip()), key=len, default="")
    yield code
    yield f"{indent}{first.lstrip()}\n{rest}"
    yield textwrap.indent(textwrap.dedent(code), indent)
    yield textwrap.indent(textwrap.dedent(f"{margin}{first.lstrip()}\n{rest}"), indent)


# ---------------------------------------------------------------- files and data sets

def own_problem(row):
    """Our own fields: task_id, prompt, tests [{"kind", "code", ...}]; starter_code, entry_point, source, difficulty, solution if wanted."""
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise ValueError("its prompt is no text")
    optional = {name: str(row.get(name) or "") for name in ("starter_code", "entry_point", "source", "difficulty", "solution")}
    return Problem(str(row["task_id"]), row["prompt"], [own_test(test) for test in row["tests"]], **optional)


def own_test(test):
    """A Test from a dict with its fields; None is as good as a missing field (Parquet fills every column)."""
    given, types = {k: v for k, v in test.items() if v is not None}, {f.name: f.type for f in fields(Test)}
    if given["kind"] not in KINDS or any(not isinstance(v, types.get(k, ())) for k, v in given.items()):
        raise ValueError(f"a test has {given}; kind is one of {', '.join(KINDS)}, the other fields are {', '.join(list(types)[1:])}")
    return Test(**given)


def read_rows(path):
    """Yields (label, row) of a .jsonl, .json (a list), .gz of either, or .parquet file; label (str) says file and row. Raises BadInput."""
    path, number = Path(path), 0
    try:
        if path.suffix == ".parquet":
            yield from labelled(path, read_parquet(path))
            return
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.lstrip().startswith("["):  # one list; else an object a line
                    yield from labelled(path, json.loads(line + file.read()))
                    return
                if line.strip():
                    yield f"{path}, row {number}", json.loads(line)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read {path} ({error}); give a .jsonl, .json, .gz or .parquet file") from None
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors
        at = f", row {number}," if number else ""
        raise BadInput(f"{path}{at} is not JSON ({error}); write one object a line, or one list") from None


def labelled(source, rows):
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, 1))


def read_parquet(path):
    """The rows of a Parquet file. Raises BadInput without the package, OSError for a broken file."""
    try:
        from pyarrow import parquet  # comes with datasets
    except ImportError:
        raise BadInput(f"{path} is a Parquet file: `pip install datasets` to read it, or give a .jsonl file") from None
    try:
        return parquet.read_table(path).to_pylist()
    except ValueError as error:
        raise OSError(one_line(error)) from None


def to_problems(rows, where, convert, limit=None, skip_bad_rows=False):
    """Problems of (label, row) pairs by `convert`: row -> Problem, or None for a row that is not wanted. `where` (str): their source.

    Returns (list[Problem], list[str]: one sentence a skipped row). Raises BadInput for a row that cannot be read, has no
    tests or has an id that came before (unless skip_bad_rows), and when no problem is left.
    """
    problems, skipped, seen = [], [], {}
    for label, row in rows:
        try:
            if (problem := convert(row)) is None:
                continue
            if not problem.tests:
                raise ValueError("it has no tests")
            if seen.setdefault(problem.task_id, label) != label:
                raise ValueError(f"its task id {problem.task_id} is also that of {seen[problem.task_id]}")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            skipped.append(f"{label}: " + (f"field {error} is missing" if isinstance(error, KeyError) else one_line(error)))
            if not skip_bad_rows:
                raise BadInput(f"{skipped[-1]}; correct the row or leave it out") from None
            continue
        problems.append(problem)
        if len(problems) == limit:
            break
    if not problems:
        reason = f"no problem that can be read ({skipped[0]})" if skipped else "no problem that is wanted"
        raise BadInput(f"{where} holds {reason}; give another file or other limits")
    return problems, skipped


def load_problems(source="tiny", limit=None, seed=0, split="train"):
    """Problems (list) to train on, or to watch while training (split="heldout").

    source (str): "tiny"; a .jsonl/.json/.gz/.parquet file in our own, KodCode's, MBPP's or another benchmark's fields; or a
    data set of the Hub with such fields, as KodCode/KodCode-V1. limit (int): at most so many; for split "train" drawn by
    seed, else the first. Raises BadInput.
    """
    from benchmarks import convert_any  # here, because benchmarks.py imports the types above
    if source == "tiny":
        source = TINY / ("train.jsonl" if split == "train" else "heldout.jsonl")
    if Path(source).suffix in (".jsonl", ".json", ".gz", ".parquet") or Path(source).exists():
        problems, _ = to_problems(read_rows(source), str(source), convert_any)
        return [problems[i] for i in chosen(len(problems), limit, seed, split)]
    data = hub_rows(str(source), split="train" if split == "train" else "test")
    rows = ((f"{source}, row {i + 1}", data[i]) for i in chosen(len(data), limit, seed, split))
    return to_problems(rows, source, convert_any)[0]


def chosen(count, limit, seed, split):
    """Indices of the problems to take: a draw by seed for training, else the first."""
    limit = count if limit is None else min(limit, count)
    return random.Random(seed).sample(range(count), limit) if split == "train" else list(range(limit))


def hub_rows(name, config=None, split="train"):
    """A data set of the Hub, indexable. Raises BadInput if `datasets` is missing or the data set cannot be had."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise BadInput(f"{name} is a data set of the Hub: `pip install datasets` to read it, or give a .jsonl file") from None
    try:
        return load_dataset(name, config, split=split)
    except Exception as error:  # datasets and the Hub client raise many kinds
        raise BadInput(f"cannot load {name} ({split}) from the Hub: {one_line(error)}; give a file, or check the name and the "
                       "network") from None


def one_line(error):
    """The first line of an exception's text, its type where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
