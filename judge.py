"""What a program's tests demand, and whether what came back from its process meets it: the judge's half of executor.py.

    plan = make_plan(test)                      # test: problems.Test; plan.code goes to the child, plan.sites stay here
    results = results_of(answer, code, [(test, plan)], limits)          # answer (dict): what the worker sent of the child

An assert like `f(3) == 7` is split: the child evaluates `f(3)` and sends plain data (encode), the judge decodes them and compares.
Runs nothing of a program: that is sandbox.py's. Leaves out: several right answers to one input.
"""
import ast
import base64
import functools
import json
import marshal
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MIB = 2**20


@dataclass(frozen=True)
class Result:
    """What one test gave: a status (see Verdict), the assert or input it stopped at, and lines that say why."""
    status: str
    where: str = ""
    why: tuple = ()


def fit(parts, room):
    """parts (list of str), the longest shortened so that together, with line breaks, they have at most room characters."""
    left = room - len(parts) + 1
    for number, size in enumerate(sorted(map(len, parts))):
        share = left // (len(parts) - number)
        if size > share:
            break
        left -= size
    return [shorten(part, share) for part in parts]


def shorten(text, size):
    """text (str) of at most size characters: its middle is replaced by a mark."""
    mark = " ... "
    if len(text) <= size:
        return text
    if size < len(mark) + 2:
        return ""
    head = (size - len(mark) + 1) // 2
    return text[:head] + mark + text[len(text) - (size - len(mark) - head):]


# ---------------------------------------------------------------- plain data: what a child may send

class BigInt(int):
    """An integer whose decimal digits would take too long to write."""
    def __repr__(self):
        return f"<an integer of about {int(self.bit_length() * 0.30103) + 1} digits>"


class SortedSet(frozenset):
    """A set whose text does not depend on hash seeds."""
    def __repr__(self):
        return "{" + ", ".join(sorted(map(repr, self))) + "}" if self else "set()"


class Other:
    """Stands for a value that is not plain data: equal to nothing."""
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def encode(value, depth=0):
    """value as JSON data. Subclasses of built-in types count as their built-in part, so no method of the program decides."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return encode(value.item(), depth)
    if depth < 200:
        for base, convert in ENCODERS.items():
            if issubclass(kind, base):
                return convert(value, depth + 1)
    return ["other", clean_text(f"<{kind.__name__} object>")]


def encode_int(value, depth):
    value = int.__add__(value, 0)
    return value if -2**63 < value < 2**63 else ["int", hex(value)]


def encode_items(name, iterate):
    return lambda value, depth: [name, *(encode(item, depth) for item in iterate(value))]


ENCODERS = {
    int: encode_int, float: lambda v, d: float.__add__(v, 0.0), str: lambda v, d: str.__str__(v),
    complex: lambda v, d: ["complex", v.real, v.imag], (bytes, bytearray): lambda v, d: ["bytes", bytes(v).hex()],
    Decimal: lambda v, d: ["decimal", Decimal.__str__(v)],
    Fraction: lambda v, d: ["fraction", *map(hex, Fraction.as_integer_ratio(v))],
    list: encode_items("list", list.__iter__), tuple: encode_items("tuple", tuple.__iter__),
    set: encode_items("set", set.__iter__), frozenset: encode_items("set", frozenset.__iter__),
    type({}.keys()): encode_items("set", iter), type({}.items()): encode_items("set", iter),
    dict: lambda v, d: ["dict", *([encode(key, d), encode(value, d)] for key, value in dict.items(v))],
}


def decode(data):
    """The value that encode() was given. Hostile data raise an error of those that result_of() expects, and cost little."""
    if not isinstance(data, list):
        return data
    name, *items = data
    if name in ("list", "tuple"):
        return (list if name == "list" else tuple)(map(decode, items))
    if name in ("set", "dict") and len(items) > 2_000:  # colliding hashes take quadratic time
        return Other(f"<a {name} of {len(items)} members>")
    if name == "set":
        return SortedSet(map(decode, items))
    if name == "dict":
        return {decode(k): decode(v) for k, v in items}
    if name == "int":
        value = int(items[0], 16)
        return value if value.bit_length() < 10_000 else BigInt(value)
    return DECODERS[name](*items)


def decode_fraction(above, below):
    return Fraction(int(above, 16), int(below, 16)) if len(above + below) < 10_000 else Other("<a long fraction>")


DECODERS = {"complex": complex, "bytes": bytes.fromhex, "decimal": Decimal, "fraction": decode_fraction, "other": Other}


def clean_text(text):
    """text without what differs from run to run (addresses), and without lone surrogates."""
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- tests: what the child gets, what the judge keeps

@dataclass(frozen=True)
class Site:
    """An assert of a test: its text, and what the judge keeps: a function of the child's value, the expected value as text.

    Without a judge the child decides, and says that it came by.
    """
    text: str
    judge: object = None
    expected: str = ""


@dataclass(frozen=True)
class Plan:
    """A test taken apart: `code` (marshalled, base64) and `names` of test functions for the child, `sites` for the judge."""
    code: str = ""
    names: tuple = ()
    sites: tuple = ()
    error: str = ""  # why this is no test


def make_plan(test):
    """The Plan of a Test."""
    try:
        if test.kind == "stdin":
            return Plan()
        if test.kind == "call":
            [json.loads(line) for line in test.input.split("\n") if line.strip()]
            wanted = json.loads(test.expected)
            return Plan(sites=(Site(call_text(test), lambda value: (list(value) if type(value) is tuple else value) == wanted,
                                    test.expected.strip()),))
        return plan_of_code(test)
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError) as error:
        return Plan(error=f"the test itself is not valid: {error}")


@functools.lru_cache(maxsize=4096)  # a problem's tests judge many programs; stdin and call tests are not kept, they may be large
def plan_of_code(test):
    tree = ast.parse(test.code)
    named = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    tests = [n for name, n in named.items() if name.lower().startswith("test")] if test.kind == "pytest" else []
    for node in tests:
        if isinstance(node, ast.AsyncFunctionDef) or fixtures(node):
            raise ValueError(f"{node.name} needs a plugin or a fixture of pytest, and neither is supported")
    if test.kind == "pytest" and not tests:
        raise ValueError("it has no test function")
    bodies = {"assert": [tree], "check": [named.get("check")],
              "pytest": [n for n in tests if isinstance(n, ast.FunctionDef) and not n.decorator_list]}[test.kind]
    if None in bodies:
        raise ValueError("it has no function check")
    sites = []
    for body in bodies:
        body.body = [split_assert(n, test.code, sites) if isinstance(n, ast.Assert) else n for n in body.body]
    tree = ast.fix_missing_locations(EqualsPlainly().visit(tree))
    code = base64.b64encode(marshal.dumps(compile(tree, "test.py", "exec", dont_inherit=True))).decode()
    return Plan(code, tuple(n.name for n in tests), tuple(sites))


def fixtures(function):
    """Names of the arguments of a test function that no parametrize fills."""
    if isinstance(function, ast.ClassDef):
        return []
    marks = [d for d in function.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func).endswith("parametrize")]
    given = {name for mark in marks for name in split_names(ast.literal_eval(mark.args[0]))}
    required = function.args.args[:len(function.args.args) - len(function.args.defaults)]
    return [a.arg for a in required if a.arg not in given]


def split_names(names):
    """The argument names of a parametrize: "x, y", or a list or tuple of names."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def split_assert(node, source, sites):
    """What the child runs instead of a top-level assert; the judge's half is appended to sites."""
    inner, outer = peel(node.test)
    if is_literal(inner):  # `assert True`
        return node
    text, number = ast.get_source_segment(source, node), ast.Constant(len(sites))
    bare = isinstance(outer.operand if isinstance(outer, ast.UnaryOp) else outer, ast.Name)
    if bare and not isinstance(inner, ast.Call):  # a computed expectation, `a == b or c == d`, ...
        sites.append(Site(text))
        return ast.copy_location(ast.Assert(call("__check__", number, node.test), node.msg), node)
    equals = isinstance(outer, ast.Compare) and isinstance(outer.ops[0], ast.Eq) and isinstance(outer.left, ast.Name)
    code = compile(ast.fix_missing_locations(ast.Expression(outer)), "judge", "eval")
    sites.append(Site(text, functools.partial(holds, code), ast.unparse(outer.comparators[0]) if equals else ""))
    return ast.copy_location(ast.Expr(call("__report__", number, call("__truth__", inner) if bare else inner)), node)


def call(name, *arguments):
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def peel(node):
    """A condition as (the expression that the child computes, the rest as a condition on the name `value`).

    Peeled off are comparisons, not, - and abs, isclose, if their other operands are literals.
    """
    def around(parts, rebuild):
        computed = [i for i, part in enumerate(parts) if not is_literal(part)]
        if len(computed) != 1:
            return node, ast.Name("value", ast.Load())
        inner, outer = peel(parts[computed[0]])
        return inner, rebuild([outer if i == computed[0] else part for i, part in enumerate(parts)])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        if isinstance(node.ops[0], (ast.In, ast.NotIn)) and is_literal(node.left):
            return node, ast.Name("value", ast.Load())  # any object may be a container
        return around([node.left, *node.comparators], lambda p: ast.Compare(p[0], node.ops, p[1:]))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return around([node.left, node.right], lambda p: ast.BinOp(p[0], node.op, p[1]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return around([node.operand], lambda p: ast.UnaryOp(node.op, p[0]))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in JUDGE_CALLS:
        name = ast.Name(ast.unparse(node.func).rpartition(".")[2], ast.Load())
        if all(k.arg and is_literal(k.value) for k in node.keywords):
            return around(node.args, lambda p: ast.Call(name, p, node.keywords))
    return node, ast.Name("value", ast.Load())


JUDGE_CALLS = ("abs", "math.fabs", "fabs", "math.isclose", "isclose")
CONSTRUCTORS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "float": float}
JUDGE_NAMES = {"__builtins__": {}, "abs": abs, "fabs": math.fabs, "isclose": math.isclose} | CONSTRUCTORS


def is_literal(node):
    """Whether a node is a literal, or set([1, 2]), float("inf") and the like."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CONSTRUCTORS and not node.keywords:
        return all(map(is_literal, node.args))
    try:
        ast.literal_eval(node)
        return True
    except (ValueError, TypeError):
        return False


def holds(code, value):
    """Whether a condition is true of a plain value; whatever it raises is a no."""
    try:
        return bool(eval(code, JUDGE_NAMES | {"value": value}))
    except Exception:
        return False


class EqualsPlainly(ast.NodeTransformer):
    """Writes == and != of a test as calls of equal(), so that the program's own __eq__ has no say about plain values."""
    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            return node
        equal = call("__equal__", node.left, *node.comparators)
        return equal if isinstance(node.ops[0], ast.Eq) else ast.UnaryOp(ast.Not(), equal)


def same_output(actual, expected):
    """LiveCodeBench's rule: stripped lines agree in number, and each is equal, or equal token by token as decimals."""
    actual, expected = ([line.strip() for line in text.strip().split("\n")] for text in (actual, expected))
    return len(actual) == len(expected) and all(a == e or same_decimals(a, e) for a, e in zip(actual, expected))


def same_decimals(a, b):
    try:
        return [Decimal(token) for token in a.split()] == [Decimal(token) for token in b.split()]
    except ArithmeticError:
        return False


def call_text(test):
    return f"{test.entry_point}({', '.join(line.strip() for line in test.input.splitlines() if line.strip())})"


# ---------------------------------------------------------------- verdicts: from what the child sent to Results

def results_of(answer, code, pairs, limits):
    """Results of the tests (list of (Test, Plan)) that ran in one process; fewer if it ended before the last."""
    events, loaded = read_events(answer["records"], len(pairs))
    results = []
    for (test, plan), seen, proof in zip(pairs, events, answer["proofs"]):
        result, reached = result_of(test, plan, seen, proof, code)
        if test.kind == "stdin" and not result and answer["end"] == "exit 0":
            output = base64.b64decode(answer["output"]).decode("utf-8", "replace")
            result = Result("passed") if same_output(output, test.expected) else Result("failed", why=stdin_text(test, output))
        if not result:  # the process ended in this test, or before the first
            end = how_it_ended(answer, limits, where_of(test, plan, reached))
            return results + [end] * (1 if loaded else len(pairs) - len(results))
        results.append(result)
    return results


def read_events(records, count):
    """A child's records (a line of JSON each, or noise of the program) as a list per test, and whether the program was loaded."""
    events, loaded = [[] for _ in range(count)], False
    for line in records.split("\n"):
        try:
            name, i, *data = json.loads(line)
            loaded |= name == "loaded"
            events[i].append((name, data))
        except (ValueError, TypeError, IndexError, RecursionError):
            pass
    return events, loaded


def result_of(test, plan, events, proof, code):
    """(Result of one test, sites passed). None for a Result: its end was not reported.

    A test passes only if it came by every site, in order, with the right values, and to its end, which the proof shows.
    """
    reached = 0
    try:
        for name, data in events:
            site = plan.sites[reached] if reached < len(plan.sites) else None
            if name == "value" and site and site.judge and data[0] == reached:
                if not site.judge(value := decode(data[1])):
                    expected = f"expected {site.expected}, " if site.expected else ""
                    return Result("failed", site.text, (f"{expected}got {value!r}",)), reached
                reached += 1
            elif name == "check" and site and not site.judge and data[0] == reached:
                reached += 1
            elif name == "infra" and data[0] == proof:
                return Result("infra", why=(f"the executor failed: {data[1]}",)), reached
            elif name == "fail":
                return failure(test, plan, reached, data[0], code), reached
            elif name == "done" and data == [proof] and not site and test.kind != "stdin":
                return Result("passed"), reached
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError):
        return Result("failed", where_of(test, plan, reached), ("the result cannot be read",)), reached
    return None, reached


def failure(test, plan, reached, data, code):
    """The Result of a test that ended by an exception: see explain() for data."""
    status, message, lines = str(data["status"]), clean_text(str(data["message"])), code.split("\n")
    frames = [f"  line {line}, in {shorten(clean_text(str(name)), 60)}: {lines[line - 1].strip()}"
              for line, name in data["frames"] if 0 < line <= len(lines)]
    where = "" if status == "syntax" else test_line(test, data["line"]) or where_of(test, plan, reached)
    if status == "failed" and data["unequal"] and "==" in where:
        actual, expected = map(decode, data["unequal"])
        message = f"expected {expected!r}, got {actual!r}"
    return Result(status if status in ("failed", "error", "memory", "exit", "syntax") else "error", where, (*frames, message))


def test_line(test, number):
    """The statement at a line of a test's code; the line alone, if it begins a block."""
    if test.kind in ("stdin", "call") or not number:
        return ""
    for node in ast.walk(ast.parse(test.code)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno <= number <= node.end_lineno:
            return ast.get_source_segment(test.code, node)
    return "".join(test.code.split("\n")[number - 1:number]).strip()


def where_of(test, plan, reached):
    """What a test was at after `reached` sites: an assert, a call or an input; else all of it."""
    if test.kind == "stdin":
        return f"input:\n{test.input.strip()}"
    return plan.sites[min(reached, len(plan.sites) - 1)].text if plan.sites else test.code.strip()


def stdin_text(test, output):
    texts = {"input": test.input, "expected output": test.expected, "your output": output}
    return tuple(f"{name}:\n{text.strip()}" for name, text in texts.items())


def how_it_ended(answer, limits, where=""):
    """The Result of a test in which the process ended: answer["end"] is timeout, output, `exit N` or `signal NAME`."""
    end = answer["end"]
    if end == "timeout":
        spent = f"{limits.cpu_seconds:g} s of CPU" if answer["cpu_spent"] else f"{limits.wall_seconds:g} s"
        return Result("timeout", where, (f"timeout: more than {spent}",))
    if end == "output":
        return Result("error", where, (f"error: more than {limits.output // MIB} MiB of output",))
    if end.startswith("signal") and end != "signal SIGKILL":
        return Result("error", where, (f"error: ended by {end}",))
    return Result("exit", where, ("the program ended before the test did",))
