"""Runs programs against tests in limited processes, and says what failed.

    with Executor() as executor:                              # one worker per core
        verdict, = executor.run([(code, problem.tests)])      # code: str; tests: list[problems.Test]
    verdict.reward, verdict.status, verdict.feedback()

A worker is an interpreter started once (by exec: nothing of CUDA or of the trainer's memory is inherited); it forks a child
per job. The caller's process is the judge. Of an assert like `f(3) == 7` the child gets only `f(3)`, and sends back plain
data; 7 and the comparison stay with the judge, so there is nothing in the program's process to find, patch or forge.

What it stops: outliving the job; more than `Limits` of CPU, wall time, memory, output, files and processes; leaving anything
behind; passing by exit, by noise on any descriptor, by objects that call themselves equal to everything. Where the kernel
allows user namespaces also: changing any file, seeing the trainer's processes, the network, others' shared memory. Where it
does not, a warning says so, and a program can open connections and leave named shared memory; it runs as nobody if the
trainer is root, else as the trainer's user, whose files and processes it can then reach.

What it cannot stop: reading files that the trainer can read; using `processes` times `memory` at once, and memory files
beside; bugs of the kernel. Objects that are not plain data equal no literal. And where a test is not of the form above (a
loop, a computed expectation, pytest.raises) the program shares a process with the test: blind tampering earns nothing, but a
program written against this file could read expectations from memory, or send the proof that the test came to its end.
If programs are hostile rather than merely wrong, run the whole trainer in something stronger, such as a virtual machine, or
    docker run --network none --read-only --tmpfs /tmp --pids-limit 4096 --memory 32g --runtime runsc ...   # runsc: gVisor

Leaves out: fixtures and plugins of pytest, languages other than Python, several right answers to one input.
"""
import ast
import atexit
import base64
import builtins
import ctypes
import functools
import gc
import json
import marshal
import math
import os
import queue
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from fractions import Fraction

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What one job (a program with all its tests) may use."""
    cpu_seconds: float = 10      # of CPU
    wall_seconds: float = 20     # and 3 more for each second of CPU used, so that a crowded machine changes no verdict
    memory: int = 1024 * MIB     # bytes of address space, per process
    output: int = 16 * MIB       # bytes written to stdout and stderr, per test
    files: int = 64 * MIB        # bytes in the working folder
    open_files: int = 256
    processes: int = 64          # with threads; without namespaces see become_child()


# ---------------------------------------------------------------- verdicts

@dataclass(frozen=True)
class Result:
    """What one test gave: a status (see Verdict), the assert or input it stopped at, and lines that say why."""
    status: str
    where: str = ""
    why: tuple = ()


@dataclass(frozen=True)
class Verdict:
    """The outcome of a job. status of one test: passed | failed | error | timeout | memory | exit | syntax | infra."""
    results: list
    public: list = field(repr=False)

    @property
    def status(self):
        return [r.status for r in self.results]

    @property
    def passed(self):
        return [r.status == "passed" for r in self.results]

    @property
    def reward(self):
        """Share of tests passed, in [0, 1]; 0.0 without tests. Meaningless where `infra` is set."""
        return sum(self.passed) / max(1, len(self.results))

    @property
    def infra(self):
        """The executor failed on a test, not the program: exclude this verdict."""
        return "infra" in self.status

    def visible(self):
        """The verdict on the public tests alone."""
        return Verdict([r for r, p in zip(self.results, self.public) if p], [True] * sum(self.public))

    def to_json(self):
        return {"passed": self.passed, "status": self.status, "reward": self.reward, "feedback": self.feedback()}

    def feedback(self, max_chars=1000):
        """What failed, for the model: counts, the first failing test, why; str of at most max_chars characters."""
        lines = [f"Passed {sum(self.passed)} of {len(self.results)} tests."]
        first = next((r for r in self.results if r.status != "passed"), None)
        room = max_chars - len(lines[0]) - 1
        if first:
            parts = [part for part in ("First failure:", first.where, *first.why) if part]
            while len(parts) > 1 and room < 16 * len(parts):
                parts.pop(0)  # the last part says most
            lines += fit(parts, room)
        return "\n".join(line for line in lines if line)[:max_chars]


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


# ---------------------------------------------------------------- the judge: asks workers, decides

class WorkerDied(Exception):
    """The worker, not the program, failed."""


class Worker:
    """The judge's end of a worker process, which is started anew when it has died."""
    def __init__(self, limits, namespaces):
        self.process, self.closed, self.mode = None, False, "isolated" if namespaces else "open"
        self.patience = limits.wall_seconds + 3 * limits.cpu_seconds + 30

    def start(self):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(self.patience)
        self.messages, self.greeted = self.socket.makefile("rwb"), False
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-B", "-X", "utf8", os.path.abspath(__file__), str(theirs.fileno()), self.mode],
                env=environment(), cwd="/", pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ask(self, request):
        """The answer (dict) to a request (dict). Raises WorkerDied if none comes."""
        try:
            if self.closed:
                raise EOFError("the executor was closed")
            if self.process is None:
                self.start()
            if not self.greeted and (note := receive(self.messages)["note"]):
                warnings.warn(note, RuntimeWarning, stacklevel=2)
            self.greeted = True
            send(self.messages, request)
            return receive(self.messages)
        except (OSError, EOFError, ValueError) as error:
            self.stop(patience=0)
            raise WorkerDied(str(error) or type(error).__name__) from None

    def stop(self, patience=5):
        """Ends the worker with whatever it runs; within patience (seconds), by its own leave."""
        process, self.process = self.process, None
        if process is None:
            return
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # the worker sees the end of file, kills its child and leaves
        except OSError:
            pass  # it has left already
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment():
    """What a worker and its programs see of ours: nothing but what Python may need to start."""
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR") if name in os.environ}
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
    return needed | threads | {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "",
                               "PYTHONHASHSEED": "0"}  # sets have one order


def send(messages, message):
    messages.write(json.dumps(message).encode() + b"\n")
    messages.flush()


def receive(messages):
    """The next message. Raises EOFError when the other end is gone."""
    if not (line := messages.readline()).endswith(b"\n"):
        raise EOFError("the worker is gone")
    return json.loads(line)


class Executor:
    """Runs jobs on `workers` processes (default: one per core that this process may use). A context manager, for any thread.

    namespaces=False does without them also where the kernel has them.
    """
    def __init__(self, workers=None, limits=Limits(), namespaces=True):
        count = workers or len(os.sched_getaffinity(0))
        self.limits, self.workers, self.idle = limits, [Worker(limits, namespaces) for _ in range(count)], queue.SimpleQueue()
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="executor")
        for worker in self.workers:
            self.idle.put(worker)
            try:
                worker.start()  # side by side
            except OSError:
                pass  # its first job tries again

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends the workers. A run() in another thread raises CancelledError, or gets infra for what was running."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.closed = True
            worker.stop()
        self.pool.shutdown()

    def run(self, jobs):
        """Verdicts (list) of jobs (list of (code, list[Test])), in the same order. Raises ValueError for a job without tests."""
        for i, (_, tests) in enumerate(jobs):
            if not tests:
                raise ValueError(f"job {i} has no tests; give it at least one, there is nothing else to judge a program by")
        return list(self.pool.map(self.judge, jobs))

    def judge(self, job):
        """The Verdict of one job, on an idle worker. A job whose worker died is run once more; then it is infra."""
        code, tests = job
        worker = self.idle.get()
        try:
            try:
                results = run_job(worker.ask, code or "", tests, self.limits)
            except WorkerDied:
                results = run_job(worker.ask, code or "", tests, self.limits)
        except WorkerDied as error:
            results = [Result("infra", why=(f"the executor failed: {error}",))] * len(tests)
        finally:
            self.idle.put(worker)
        return Verdict(results, [test.public for test in tests])


def run_job(ask, code, tests, limits):
    """Results (list) of a program's tests. Tests share a process until one ends it; each stdin test has one of its own."""
    if not code.strip():
        return [Result("syntax", why=("No Python code was found in the answer.",))] * len(tests)
    plans = [make_plan(test) for test in tests]
    results = [Result("infra", why=(plan.error,)) if plan.error else None for plan in plans]
    cpu, idle = limits.cpu_seconds, limits.wall_seconds
    while None in results:
        batch = next_batch(tests, results)
        left = asdict(limits) | {"cpu_seconds": cpu, "wall_seconds": idle}
        answer = ask({"program": code, "limits": left, "tests": [
            {"kind": tests[i].kind, "code": plans[i].code, "names": plans[i].names, "entry_point": tests[i].entry_point,
             "input": tests[i].input} for i in batch]})
        if answer["end"] == "infra":
            raise WorkerDied(answer["note"])
        cpu, idle = cpu - answer["cpu"], idle - answer["idle"]
        for i, result in zip(batch, results_of(answer, code, [(tests[i], plans[i]) for i in batch], limits)):
            results[i] = result
        if answer["end"] == "timeout":  # the time is the job's, not the test's
            results = [result or how_it_ended(answer, limits) for result in results]
    return results


def next_batch(tests, results):
    """Indices of the next tests for one process: a stdin test, or those up to the next stdin test (1,000 at most)."""
    first, batch = results.index(None), []
    for i in range(first, len(tests)):
        if tests[i].kind == "stdin" and results[i] is None:
            return batch or [i]
        if results[i] is None and len(batch) < 1000:
            batch.append(i)
    return batch


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


# ---------------------------------------------------------------- the worker: forks a child per request

LIBC = ctypes.CDLL(None, use_errno=True)
SUBREAPER, PDEATHSIG, KEEPCAPS, NO_NEW_PRIVS = 36, 1, 8, 38       # prctl(2)
NEW_NAMESPACES = 0x10000000 + 0x20000 + 0x20000000 + 0x40000000 + 0x8000000  # unshare(2): user, mount, PID, network, IPC
NOBODY = 65534
SHM = "/dev/shm"                                                  # in namespaces: a file system of the job's own, and its folder
SPARE = 16 * MIB                                                  # of memory, to report that there is no more
HEADER = "\n".join([f"from {name} import *\nimport {name}" for name in (  # as LiveCodeBench does
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json typing".split()
)] + ["from builtins import *"])                                  # so that pow and open are the built-in ones
WARM = "numpy", "scipy", "pandas", "sympy", "networkx", "pytest"  # imported by the worker once a job names them


def main(control, mode):
    """A worker: answers the requests on a socket until its other end closes. mode: isolated, or open (no namespaces)."""
    sys.path.pop(0)  # our folder: the program shall not import from it
    sys.argv = ["solution.py"]
    sys.set_int_max_str_digits(0)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, programs go first, not the trainer
    except OSError:
        pass
    note = isolate(control) if mode == "isolated" else do_without("not wanted")
    messages = control.makefile("rwb")
    worker = types.SimpleNamespace(control=control.fileno(), isolated=not note, wake=wake_up_pipe(), header={})
    exec(HEADER, worker.header)
    send(messages, {"note": note})
    while True:
        try:
            request = receive(messages)
            warm_up(request)
            send(messages, serve(request, worker))
        except (EOFError, ConnectionError):
            os._exit(0)


def wake_up_pipe():
    """A descriptor that becomes readable when a child ends."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable


def warm_up(request):
    """Imports what the request names, once and for all children; notes the types that are not a program's."""
    for name in WARM:
        if name not in WARMED and (name in request["program"] or any(name == test["kind"] for test in request["tests"])):
            try:
                __import__(name)
            except Exception:
                pass  # not installed: that is for the program to find out
            WARMED.add(name)
            KNOWN_TYPES.clear()
    if not KNOWN_TYPES:
        todo = [object]
        while todo:
            new = {kind for kind in type.__subclasses__(todo.pop()) if kind not in KNOWN_TYPES}
            KNOWN_TYPES.update(new)
            todo += new
        gc.freeze()


KNOWN_TYPES, WARMED = set(), set()


def isolate(control):
    """Puts this process into namespaces of its own as their init; returns "", or why not. The process we were waits for it."""
    trial = os.fork()
    if trial == 0:
        try:
            enter_namespaces()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
    if code := os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]):
        return do_without(os.strerror(abs(code)))
    enter_namespaces()
    if init := os.fork():
        control.close()
        os.waitpid(init, 0)
        os._exit(0)
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        must(LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # no further ones: they would offer the program more of the kernel
    except OSError:  # parts of /proc are masked, as in containers: no /proc then
        must(LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", 1, None))
    return ""


def do_without(reason):
    """Adopts orphans, which an init does anyway; returns the warning."""
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    return (f"executor: no user namespaces ({reason}), so programs can reach the network, and files and processes of their user;"
            " run in a container, see executor.py")


def enter_namespaces():
    """New namespaces with read-only files, where we are user 0; outside we are the same user, or if that was root, nobody.

    Root would be exempt from the limit on processes. As its files belong to user 1 here, our capabilities still let us read them.
    """
    uid, gid, (go, ready) = os.geteuid(), os.getegid(), os.pipe()
    helper = os.fork()  # only a process outside may map a user that is not its own
    if helper == 0:
        try:
            os.close(ready)
            os.read(go, 1)  # until the other end closes
            map_ids(f"/proc/{os.getppid()}/", uid, gid)
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
    failed = LIBC.unshare(NEW_NAMESPACES) and ctypes.get_errno()
    os.close(ready)
    os.close(go)
    failed = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]) or failed
    if failed:
        raise OSError(failed, os.strerror(failed))
    become(0)
    must(LIBC.mount(None, b"/", None, 0x44000, None))  # MS_REC | MS_PRIVATE
    read_only = (ctypes.c_uint64 * 4)(1)
    LIBC.syscall(442, -100, b"/", 0x8000, read_only, ctypes.c_size_t(32))  # mount_setattr(2), all below; from Linux 5.12 on
    must(LIBC.mount(b"tmpfs", SHM.encode(), b"tmpfs", 0, None))


def map_ids(process, uid, gid):
    """Maps the user ids of a process in a new namespace: root's as nobody's, where we may."""
    def write(name, text):
        with open(process + name, "w") as file:
            file.write(text)
    try:
        if uid:
            raise PermissionError
        for name in ("uid_map", "gid_map"):
            write(name, f"0 {NOBODY} 1\n1 0 1")
    except OSError:
        write("setgroups", "deny")
        write("uid_map", f"0 {uid} 1")
        write("gid_map", f"0 {gid} 1")


def become(user):
    """Takes a user id (int) in place of root's, with the group of the same number."""
    try:
        os.setgroups([])
    except PermissionError:  # the user of the namespace may not
        pass
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def must(failed):
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def serve(request, worker):
    """Runs the program and tests of a request in a child; returns what they sent, and how the child ended."""
    folder = make_folder(request["limits"], worker.isolated)
    stdin, records = os.memfd_create("stdin"), os.memfd_create("records")
    (out_r, out_w), (proofs_r, proofs_w) = os.pipe(), os.pipe()
    try:
        if whole := request["tests"][0]["kind"] == "stdin":
            with open(stdin, "wb", closefd=False) as file:
                file.write(request["tests"][0]["input"].encode("utf-8", "replace"))
            os.lseek(stdin, 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            try:
                become_child(request["limits"], folder, worker.isolated, stdin, out_w, sorted((records, proofs_r)))
            except BaseException as error:  # our failure, as the proof shows
                os.write(records, json.dumps(["infra", 0, os.read(proofs_r, 32).decode(), str(error)]).encode())
                os._exit(1)
            try:
                run_program(request, worker.header, records, proofs_r)
            finally:
                os._exit(1)
        proofs = [os.urandom(16).hex() for _ in request["tests"]]  # made after the fork, so that the child's memory holds none
        os.write(proofs_w, "".join(proofs).encode())
        output = bytearray()
        limits = request["limits"] | {"output": request["limits"]["output"] * len(proofs)}
        end = watch(pid, limits, worker, out_r, output, whole)
        kill_all(pid, worker.isolated)
        return end | {"proofs": proofs, "output": base64.b64encode(output).decode(),
                      "records": os.pread(records, 16 * MIB, 0).decode("utf-8", "replace")}
    except OSError as error:
        return {"end": "infra", "note": f"no process for a program: {error}"}
    finally:
        for fd in (stdin, records, out_r, out_w, proofs_r, proofs_w):
            os.close(fd)
        remove_folder(folder, worker.isolated)


def make_folder(limits, isolated):
    if isolated:
        options = f"size={limits['files']},nr_inodes=10000,mode=777"
        must(LIBC.mount(b"tmpfs", SHM.encode(), b"tmpfs", 6, options.encode()))  # MS_NOSUID | MS_NODEV
        return SHM
    folder = tempfile.mkdtemp(prefix="executor-")
    os.chmod(folder, 0o777)
    return folder


def remove_folder(folder, isolated):
    if isolated:
        LIBC.umount2(SHM.encode(), 2)  # MNT_DETACH
        return
    try:
        os.rmdir(folder)
    except OSError:  # not empty; rm, unlike shutil.rmtree, gets through any depth
        subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)


def watch(pid, limits, worker, out_r, output, keep):
    """Waits until the child ends or breaks a limit, and drains its output, into `output` (bytearray) if `keep`.

    Returns {"end": see how_it_ended, "cpu": seconds, "idle": wall seconds less 3 for each of CPU, "cpu_spent": whether all}.
    For a trivial job it wakes up once: results lie in a memory file, and we hold the pipe's other end, too: it never ends.
    """
    def drain():
        try:
            data = os.read(out_r, 65536)
        except BlockingIOError:
            return 0
        output.extend(data if keep else b"")
        return len(data)

    def until_limit():
        """Seconds in which no limit of time can be reached: all cores may work for the job."""
        return min((limits["cpu_seconds"] - cpu) / (os.cpu_count() or 1), limits["wall_seconds"] - idle)

    os.set_blocking(out_r, False)
    poll = select.poll()
    for fd in (out_r, worker.wake, worker.control):
        poll.register(fd, select.POLLIN)
    start, cpu, idle, total, end = time.monotonic(), 0.0, 0.0, 0, ""
    next_look = start + until_limit()
    while not end:
        for fd, _ in poll.poll(max(0, (next_look - time.monotonic()) * 1000)):
            if fd == out_r:
                total += drain()
            elif fd == worker.wake:
                os.read(fd, 4096)
            else:  # the judge is gone, or wants us to stop
                kill_all(pid, worker.isolated)
                os._exit(0)
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done or time.monotonic() >= next_look:
            cpu = usage.ru_utime + usage.ru_stime if done else cpu_used(pid, worker.isolated)
            idle = max(0.0, time.monotonic() - start - 3 * cpu)
            next_look = time.monotonic() + max(0.01, until_limit())
            code = os.waitstatus_to_exitcode(status)
            how = f"exit {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            end = "timeout" if until_limit() <= 0 else how if done else ""
        while done and total <= limits["output"] and (more := drain()):  # what was written before the end
            total += more
        end = "output" if total > limits["output"] else end
    return {"end": end, "cpu": cpu, "idle": idle, "cpu_spent": cpu >= limits["cpu_seconds"]}


def cpu_used(pid, isolated):
    """CPU seconds of a child; in a PID namespace, of the processes that came after it, too (numbers are given out in order)."""
    used = 0.0
    for number in range(pid, pid + (200 if isolated else 1)):
        try:
            used += time.clock_gettime(~number << 3 | 2)  # the CPU clock of another process: see clock_getcpuclockid(3)
        except OSError:  # there is no such process
            pass
    return used


def kill_all(pid, isolated):
    """Kills and reaps whatever the job has started."""
    try:
        os.kill(-1, signal.SIGKILL) if isolated else os.killpg(pid, signal.SIGKILL)  # -1: all in our namespace
    except OSError:
        pass
    try:
        while True:
            if os.waitpid(-1, 0 if isolated else os.WNOHANG) == (0, 0):
                for orphan in children():
                    os.kill(orphan, signal.SIGKILL)
                time.sleep(0.001)
    except ChildProcessError:
        pass


def children():
    """Process ids of our children: as subreaper, also of orphans."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    yield int(name)
        except OSError:
            pass


# ---------------------------------------------------------------- the child: runs the program and its tests

def become_child(limits, folder, isolated, stdin, output, keep):
    """From a fork of the worker to a process with limits, no privileges, no other descriptors, and `folder` to work in."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate((stdin, output, output)):
        os.dup2(fd, number)
    for low, high in zip([3, *(fd + 1 for fd in keep)], [*keep, 256]):
        os.closerange(low, high)
    os.chdir(folder)
    os.environ["TMPDIR"] = folder
    limit("AS", limits["memory"], limits["memory"] + SPARE)
    for name, value in (("FSIZE", limits["files"]), ("NOFILE", limits["open_files"]), ("CORE", 0)):
        limit(name, value)
    limit("CPU", 2 * max(0, math.ceil(limits["cpu_seconds"])) + 5)  # counts ticks, up to a third too many; the worker is exact
    drop_privileges(isolated)
    if isolated:
        limit("NPROC", limits["processes"] + 3)  # two of them are the worker
    else:  # counted are the jobs of all workers, and whatever else the same user runs
        limit("NPROC", limits["processes"] * (os.cpu_count() or 1) + (0 if os.geteuid() == NOBODY else 512))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", encoding="utf-8", errors="surrogateescape", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def limit(name, soft, hard=None):
    """Sets a resource limit, or the highest one allowed."""
    kind = getattr(resource, f"RLIMIT_{name}")
    top = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, [value if top == resource.RLIM_INFINITY else min(value, top) for value in (soft, hard or soft)])


def drop_privileges(isolated):
    """Root outside namespaces becomes nobody. Of root's capabilities, reading is left: Python may lie in a closed folder."""
    if not isolated and os.geteuid() == 0:
        LIBC.prctl(KEEPCAPS, 1, 0, 0, 0)
        try:
            become(NOBODY)
        except OSError:  # root of a container that has no other user
            pass
    version = (ctypes.c_uint32 * 2)(0x20080522, 0)
    for capabilities in (4, 0):  # CAP_DAC_READ_SEARCH, if we have it
        if LIBC.capset(version, (ctypes.c_uint32 * 6)(capabilities, capabilities)) == 0:
            break
    LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_program(request, header, records, proofs):
    """Runs the program, then its tests; what happens goes to the descriptor `records`. Does not return."""
    tests, kinds, write, dumps = request["tests"], {test["kind"] for test in request["tests"]}, os.write, json.dumps

    def emit(*record):
        data = f"\n{dumps(record)}\n".encode()
        while data:
            data = data[write(records, data):]

    module = types.ModuleType("__main__" if "stdin" in kinds else "solution")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    if kinds & {"stdin", "call"}:
        streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}  # not those that the worker imported
        vars(module).update(header, __name__=module.__name__, __builtins__=builtins, **streams)
        sys.setrecursionlimit(50_000)
    try:
        code = None
        code = compile(request["program"], "solution.py", "exec", dont_inherit=True)
        exec(code, vars(module))
    except BaseException as error:
        if not ("stdin" in kinds and isinstance(error, SystemExit)):
            for i in range(len(tests)):
                emit("fail", i, explain(error, code is None))
            os._exit(0)
    if "stdin" in kinds:  # end as an interpreter does
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
    emit("loaded", 0)
    run_tests(tests, vars(module), emit, functools.partial(os.read, proofs, 32))
    os._exit(0)


def run_tests(tests, space, emit, next_proof):
    """Runs tests (list of dict) in a program's namespace; next_proof() gives what shows that a test came to its end."""
    run_test = TestRun
    for i, test in enumerate(tests):
        restore()
        sys.settrace(None)
        sys.setprofile(None)
        try:
            run_test(i, emit).run(test, space)
        except BaseException as error:
            emit("fail", i, explain(error))
            next_proof()
        else:
            emit("done", i, next_proof().decode())


restore = functools.partial(vars(builtins).update, dict(vars(builtins)))  # undoes what a program did to the built-in names


class TestRun:
    """One test in the child, and the functions that its code calls in place of asserts and ==."""
    __test__ = False

    def __init__(self, i, emit):
        self.i, self.emit = i, emit

    def report(self, site, value):
        restore()
        self.emit("value", self.i, site, encode(value))

    def check(self, site, value):
        restore()
        if value:
            self.emit("check", self.i, site)
        return value

    def run(self, test, space):
        UNEQUAL.clear()
        entry = test["entry_point"]
        if test["kind"] == "call":
            function = getattr(space["Solution"](), entry) if hasattr(space.get("Solution"), entry) else space[entry]
            self.report(0, function(*(json.loads(line) for line in test["input"].split("\n") if line.strip())))
            return
        if test["kind"] == "pytest":
            space = dict(space, __name__="test_solution")
        space.update(__report__=self.report, __check__=self.check, __equal__=equal, __truth__=bool)
        exec(marshal.loads(base64.b64decode(test["code"])), space)
        if test["kind"] == "check":
            space["check"](space[entry])
        for name in test["names"]:
            run_pytest(space[name])


def run_pytest(thing):
    """Calls a test function, or the test methods of a class, with all their parametrized arguments."""
    if isinstance(thing, type):
        for name in [name for name in vars(thing) if name.startswith("test")]:
            case = thing()
            for setup in ("setUp", "setup_method"):
                getattr(case, setup, lambda: None)()
            run_pytest(getattr(case, name))
        return
    calls = [{}]
    for mark in getattr(thing, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = split_names(mark.args[0]), mark.args[1]
            rows = [row.values if type(row).__name__ == "ParameterSet" else row if len(names) > 1 else [row] for row in rows]
            calls = [arguments | dict(zip(names, row)) for arguments in calls for row in rows]
    for arguments in calls:
        thing(**arguments)


def equal(a, b):
    """a == b; between an object of the program's own and anything else, only its built-in part counts."""
    restore()
    try:
        mine = foreign(a), foreign(b)
    except RecursionError:
        mine = False, False
    result = decode(encode(a)) == decode(encode(b)) if mine[0] != mine[1] else a == b
    if result is False:
        UNEQUAL[:] = a, b
    return result


UNEQUAL = []  # the last two values that were not, for the feedback
CONTAINERS = {list: list.__iter__, tuple: tuple.__iter__, set: set.__iter__, frozenset: frozenset.__iter__,
              dict: lambda d: (x for pair in dict.items(d) for x in pair)}


def foreign(value):
    """Whether a value is, or holds, an object of a class that the program defined."""
    kind = type(value)
    return any(map(foreign, CONTAINERS[kind](value))) if kind in CONTAINERS else kind not in KNOWN_TYPES


def explain(error, at_compile=False):
    """What to tell of an exception: status, message, line of the test, frames of the program ([line, name]), unequal values."""
    if isinstance(error, MemoryError):
        limit("AS", resource.getrlimit(resource.RLIMIT_AS)[1])
    places, trace = [], error.__traceback__
    while trace:
        code = trace.tb_frame.f_code
        places.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    in_test = [line for file, line, _ in places if file == "test.py"]
    kind, status = type(error).__name__, "error"
    try:
        message = shorten(f"{kind}: {error}", 4000) if str(error) else kind
    except Exception:
        message = kind
    if at_compile:
        line = f" (line {error.lineno})" if getattr(error, "lineno", 0) else ""
        status, message = "syntax", f"{kind}: {getattr(error, 'msg', error)}{line}"
    elif isinstance(error, MemoryError):
        status, message = "memory", f"MemoryError: more than {(resource.getrlimit(resource.RLIMIT_AS)[1] - SPARE) // MIB} MiB"
    elif isinstance(error, SystemExit):
        status, message = "exit", "the program ended before the test did"
    elif kind in ("AssertionError", "Failed") and in_test and places[-1][0] != "solution.py":
        status = "failed"
    return {"status": status, "message": message, "line": in_test[0] if in_test else 0,
            "frames": [[line, name] for file, line, name in places if file == "solution.py"][-3:],
            "unequal": [encode(value) for value in UNEQUAL] if status == "failed" and not str(error) else []}


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
