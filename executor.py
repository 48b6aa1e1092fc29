"""Runs programs against tests in limited processes, and says what failed.

    with Executor() as executor:                              # one worker per core
        verdict, = executor.run([(code, problem.tests)])      # code: str; tests: list[problems.Test]
    verdict.reward, verdict.status, verdict.feedback()

A worker is an interpreter started once (by exec: nothing of CUDA or of the trainer's memory is inherited); it forks a child
per job. The caller's process is the judge. Of an assert like `f(3) == 7` the child gets only `f(3)`, and sends back plain data;
7 and the comparison stay with the judge, so there is nothing in the program's process to find, patch or forge.

What it stops, where the kernel allows user namespaces (else a warning says so once): changing any file, seeing the trainer's
processes, the network, System V memory; and everywhere: outliving the job, more than `Limits` of CPU, wall time, memory,
output, files and processes, leaving anything behind, passing by exit, by noise on any descriptor, by objects that equal everything.
What it cannot stop: reading files that the trainer may read; up to `processes` times `memory` in use at once; bugs of the kernel;
and a program written against this file, where a test is not of the form above (a loop, a computed expectation, pytest.raises):
there the program shares a process with the test, and could send the test's proof of completion itself. Without namespaces it can also
change the trainer's files, open connections and signal processes of the same user. For programs that are hostile rather than merely
wrong, run the whole trainer in something stronger: `docker run --network none --read-only --tmpfs /tmp --pids-limit 4096 ...`, with
`--runtime runsc` for gVisor, or on a virtual machine of its own.

Leaves out: pytest fixtures and plugins, languages other than Python, special judges (several right answers).
"""
import ast
import base64
import builtins
import ctypes
import errno
import functools
import gc
import json
import math
import os
import queue
import re
import resource
import select
import shutil
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
from decimal import Decimal, InvalidOperation

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What one job (a program with all its tests) may use."""
    cpu_seconds: float = 10      # of CPU
    wall_seconds: float = 20     # asleep or waiting; a second of CPU used extends it by 3, so that a crowded machine changes no verdict
    memory: int = 1024 * MIB     # bytes of address space, per process
    output: int = 16 * MIB       # bytes written to stdout and stderr, or sent as results
    files: int = 64 * MIB        # bytes in the working folder
    open_files: int = 256
    processes: int = 64          # with threads; in user namespaces only


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
        if first:
            *context, last = [text for text in ("First failure:", first.where, *first.why) if text]
            share = max(40, max_chars // 3)
            lines += [shorten(text, share) for text in context]
            room = max_chars - len(lines[0]) - 1
            last = shorten(last, min(room, max(share, room // 2)))
            lines = [lines[0], shorten("\n".join(lines[1:]), room - len(last) - 1), last]
        return "\n".join(line for line in lines if line)[:max_chars]


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


def encode_dict(value, depth):
    return ["dict", *([encode(k, depth), encode(v, depth)] for k, v in dict.items(value))]


ENCODERS = {
    int: encode_int, float: lambda v, d: float.__add__(v, 0.0), str: lambda v, d: str.__str__(v),
    complex: lambda v, d: ["complex", v.real, v.imag], (bytes, bytearray): lambda v, d: ["bytes", bytes(v).hex()],
    list: encode_items("list", list.__iter__), tuple: encode_items("tuple", tuple.__iter__),
    set: encode_items("set", set.__iter__), frozenset: encode_items("set", frozenset.__iter__),
    type({}.keys()): encode_items("set", iter), dict: encode_dict,
}


def decode(data):
    """The value that encode() was given; hostile data raise ValueError, TypeError or RecursionError, and cost no more than their size."""
    if not isinstance(data, list):
        return data
    name, *items = data
    if name in ("list", "tuple"):
        return (list if name == "list" else tuple)(map(decode, items))
    if name in ("set", "dict") and len(items) > 10_000:  # colliding hashes take quadratic time
        return Other(f"<a {name} of {len(items)} members>")
    if name == "set":
        return SortedSet(map(decode, items))
    if name == "dict":
        return {decode(k): decode(v) for k, v in items}
    if name == "int":
        value = int(items[0], 16)
        return value if value.bit_length() < 10_000 else BigInt(value)
    return {"complex": lambda a, b: complex(a, b), "bytes": bytes.fromhex, "other": Other}[name](*items)


def clean_text(text):
    """text without what differs from run to run (addresses), and without lone surrogates."""
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- tests: what the child gets, what the judge keeps

@dataclass(frozen=True)
class Site:
    """An assert of a test: its text, and with the judge kept what to compute from the child's value (None: the child decides)."""
    text: str
    judge: object = None
    expected: str = ""


@dataclass(frozen=True)
class Plan:
    """A test split in two: `code` for the child, where asserts are calls; `sites` for the judge; error: why the test is none."""
    code: str = ""
    sites: tuple = ()
    error: str = ""


def is_literal(node):
    try:
        ast.literal_eval(node)
        return True
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return isinstance(node, ast.Call) and ast.unparse(node) in ("set()", "float('inf')", "float('-inf')")


def peel(node):
    """Splits a condition: returns (expression for the child, condition on `value` for the judge); peels ==, <, not, abs, isclose ..."""
    def descend(parts, rebuild):
        rest = [i for i, part in enumerate(parts) if not is_literal(part)]
        if len(rest) != 1:
            return None
        inner, outer = peel(parts[rest[0]])
        return inner, rebuild([outer if i == rest[0] else part for i, part in enumerate(parts)])
    split = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        split = descend([node.left, *node.comparators], lambda p: ast.Compare(p[0], node.ops, p[1:]))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        split = descend([node.left, node.right], lambda p: ast.BinOp(p[0], node.op, p[1]))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        split = descend([node.operand], lambda p: ast.UnaryOp(node.op, p[0]))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("abs", "math.fabs", "math.isclose", "isclose"):
        if all(k.arg and is_literal(k.value) for k in node.keywords):
            name = ast.Name({"abs": "abs", "math.fabs": "abs"}.get(ast.unparse(node.func), "isclose"), ast.Load())
            split = descend(node.args, lambda p: ast.Call(name, p, node.keywords))
    return split or (node, ast.Name("value", ast.Load()))


class EqualsPlainly(ast.NodeTransformer):
    """Writes == and != of a test as calls, so that the program's own __eq__ has no say about plain values."""
    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            call = ast.Call(ast.Name("__equal__", ast.Load()), [node.left, *node.comparators], [])
            return call if isinstance(node.ops[0], ast.Eq) else ast.UnaryOp(ast.Not(), call)
        return node


def split_assert(node, source, sites):
    """The statement that the child runs instead of a top-level assert; its other half is appended to sites."""
    text = ast.get_source_segment(source, node) or ast.unparse(node)
    inner, outer = peel(node.test)
    number = ast.Constant(len(sites))
    if is_literal(inner):  # `assert True`
        return node
    if isinstance(outer, ast.Name) and not isinstance(inner, ast.Call):  # a computed expectation, a comparison of two calls, ...
        sites.append(Site(text))
        return ast.Assert(ast.Call(ast.Name("__check__", ast.Load()), [number, node.test], []), node.msg)
    if isinstance(outer, ast.Name) or isinstance(outer, ast.UnaryOp) and isinstance(outer.operand, ast.Name):
        inner = ast.Call(ast.Name("__truth__", ast.Load()), [inner], [])  # assert f(x): only its truth is needed
    equals = isinstance(outer, ast.Compare) and isinstance(outer.ops[0], ast.Eq) and isinstance(outer.left, ast.Name)
    judge = compile(ast.fix_missing_locations(ast.Expression(outer)), "judge", "eval")
    sites.append(Site(text, judge, ast.unparse(outer.comparators[0]) if equals else ""))
    return ast.Expr(ast.Call(ast.Name("__report__", ast.Load()), [number, inner], []))


@functools.lru_cache(maxsize=4096)
def plan(test):
    """The Plan of a test (cached: a problem's tests judge many programs)."""
    sites = []
    try:
        if test.kind == "call":
            json.loads(test.expected)
            [json.loads(line) for line in test.input.split("\n") if line.strip()]
            return Plan(test.code)
        if test.kind == "stdin":
            return Plan()
        tree = ast.parse(test.code)
        bodies = {"assert": [tree], "check": [n for n in tree.body if getattr(n, "name", "") == "check"][-1:],
                  "pytest": [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test") and not n.decorator_list]}
        for body in bodies[test.kind]:
            body.body = [split_assert(n, test.code, sites) if isinstance(n, ast.Assert) else n for n in body.body]
        tree = ast.fix_missing_locations(EqualsPlainly().visit(tree))
        return Plan(ast.unparse(tree), tuple(sites))
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError) as error:
        return Plan(error=f"the test itself is not valid: {type(error).__name__}: {error}")


def holds(site, value):
    """Whether a site's condition is true of a plain value; whatever it raises is no."""
    try:
        return bool(eval(site.judge, {"__builtins__": {"abs": abs, "set": set, "float": float}, "isclose": math.isclose, "value": value}))
    except Exception:
        return False


def same_output(actual, expected):
    """LiveCodeBench's rule: stripped lines agree in number, and each is equal, or equal token by token as decimals."""
    actual, expected = ([line.strip() for line in text.strip().split("\n")] for text in (actual, expected))
    return len(actual) == len(expected) and all(a == e or same_decimals(a, e) for a, e in zip(actual, expected))


def same_decimals(a, b):
    try:
        return [Decimal(token) for token in a.split()] == [Decimal(token) for token in b.split()]
    except InvalidOperation:
        return False


# ---------------------------------------------------------------- the judge: runs jobs on workers

class WorkerDied(Exception):
    """The worker, not the program, failed."""


class Worker:
    """The caller's end of a worker process; started anew when it died."""
    def __init__(self, limits):
        self.limits, self.process, self.socket = limits, None, None

    def start(self):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-B", "-X", "utf8", os.path.abspath(__file__), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=ENVIRONMENT, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True)
        self.socket = ours

    def stop(self):
        """Ends the worker and whatever it runs."""
        if self.process:
            self.socket.close()  # the worker sees the end of file, kills its child and leaves
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def ask(self, request):
        """The answer (dict) to a request (dict). Raises WorkerDied when none comes in time."""
        try:
            if self.process is None:
                self.start()
            longest = self.limits.wall_seconds + 3 * self.limits.cpu_seconds
            self.socket.settimeout(longest + 30)
            send(self.socket, request)
            return receive(self.socket)
        except (OSError, EOFError, ValueError) as error:
            if self.process:
                self.process.kill()
            self.stop()
            raise WorkerDied(str(error) or type(error).__name__) from None


def send(sock, message):
    data = json.dumps(message).encode()
    sock.sendall(len(data).to_bytes(8, "big") + data)


def receive(sock):
    """The next message; EOFError when the other end is gone."""
    return json.loads(read_exactly(sock, int.from_bytes(read_exactly(sock, 8), "big")))


def read_exactly(sock, size):
    data = bytearray()
    while len(data) < size:
        if not (part := sock.recv(min(size - len(data), MIB))):
            raise EOFError("the worker is gone")
        data += part
    return bytes(data)


ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "",
               **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}}


class Executor:
    """Runs jobs on `workers` processes (default: one per core of this process). A context manager; usable from any thread."""
    def __init__(self, workers=None, limits=Limits()):
        self.limits = limits
        count = workers or len(os.sched_getaffinity(0))
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="executor")
        self.idle = queue.SimpleQueue()
        self.workers = [Worker(limits) for _ in range(count)]
        for worker in self.workers:
            try:
                worker.start()
            except OSError:
                worker.process = None  # its first job tries again, and reports infra if that fails
            self.idle.put(worker)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends the workers; jobs that still run become infra."""
        self.pool.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.stop()

    def run(self, jobs):
        """Verdicts (list) of jobs (list of (code, list[Test])), in the same order. Raises ValueError for a job without tests."""
        for i, (_, tests) in enumerate(jobs):
            if not tests:
                raise ValueError(f"job {i} has no tests; a program can only be judged by tests")
        return list(self.pool.map(self.judge, jobs))

    def judge(self, job):
        """The Verdict of one job, on an idle worker; a job whose worker died is run once more, then infra."""
        code, tests = job
        worker = self.idle.get()
        try:
            for _ in range(2):
                try:
                    results = run_job(worker.ask, code or "", tests, self.limits)
                    break
                except WorkerDied as error:
                    results = [Result("infra", why=(f"the executor failed: {error}",))] * len(tests)
        finally:
            self.idle.put(worker)
        return Verdict(results, [test.public for test in tests])


def run_job(ask, code, tests, limits):
    """Results (list) of a program's tests. Consecutive tests share a process until one ends it; each stdin test has its own."""
    if not code.strip():
        return [Result("syntax", why=("No Python code was found in the answer.",))] * len(tests)
    plans = [plan(test) for test in tests]
    results = [Result("infra", why=(p.error,)) if p.error else None for p in plans]
    left = {"cpu_seconds": limits.cpu_seconds, "wall_seconds": limits.wall_seconds}
    while None in results:
        batch = next_batch(tests, results)
        answer = ask({"code": code, "limits": asdict(limits) | left, "tests": [
            {"kind": tests[i].kind, "code": plans[i].code, "entry_point": tests[i].entry_point, "input": tests[i].input} for i in batch]})
        if answer["end"] == "infra":
            raise WorkerDied(answer["note"])
        left = {"cpu_seconds": left["cpu_seconds"] - answer["cpu"], "wall_seconds": left["wall_seconds"] - answer["idle"]}
        for i, result in zip(batch, results_of(answer, code, [(tests[i], plans[i]) for i in batch], limits)):
            results[i] = result
        if answer["end"] == "timeout":
            results = [r or how_it_ended(answer, limits) for r in results]
    return results


def next_batch(tests, results):
    """Indices of the next tests for one process: a stdin test alone, else those up to the next stdin test."""
    first, batch = results.index(None), []
    for i in range(first, len(tests)):
        if tests[i].kind == "stdin":
            return batch or [i]
        if results[i] is None and len(batch) < 1000:
            batch.append(i)
    return batch


def results_of(answer, code, pairs, limits):
    """Results for tests (list of (Test, Plan)) that ran in one process: one of None for those that it did not come to."""
    events, loaded = read_events(answer["records"], len(pairs))
    results = []
    for (test, plan_), seen, proof in zip(pairs, events, answer["proofs"]):
        result = result_of(test, plan_, seen, proof, answer, code)
        if result is None:  # the process ended in this test
            end = how_it_ended(answer, limits, plan_, seen)
            return results + [end] * (1 if loaded else len(pairs) - len(results))
        results.append(result)
    return results


def read_events(records, count):
    """The child's records (str, a line each; hostile) as a list of (name, data) per test, and whether the program itself had run."""
    events, loaded = [[] for _ in range(count)], False
    for line in records.split("\n"):
        try:
            name, i, *data = json.loads(line)
            loaded |= name == "loaded"
            events[i].append((name, data))
        except (ValueError, TypeError, IndexError, RecursionError):
            pass  # noise that the program wrote there
    return events, loaded


def result_of(test, plan_, events, proof, answer, code):
    """The Result of one test from what its process sent; None if it sent no end of the test."""
    reached = 0  # sites passed; a test passes only if it came by all of them, in order, and to its end
    for name, data in events:
        try:
            if name in ("value", "check") and data[0] == reached < len(plan_.sites):
                site = plan_.sites[reached]
                if (site.judge is None) != (name == "check"):
                    continue
                if name == "value" and not holds(site, value := decode(data[1])):
                    return Result("failed", site.text, (f"expected {site.expected}, got {value!r}" if site.expected else f"got {value!r}",))
                reached += 1
            elif name == "fail":
                return failure(test, plan_, reached, data[0], code)
            elif name == "result" and test.kind == "call":
                value = decode(data[0])
                wanted = json.loads(test.expected)
                if (list(value) if isinstance(value, tuple) else value) != wanted:
                    return Result("failed", call_text(test), (f"expected {test.expected.strip()}, got {value!r}",))
                reached = -1
            elif name == "done" and data == [proof] and test.kind != "stdin":
                if reached == (-1 if test.kind == "call" else len(plan_.sites)):
                    return Result("passed")
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
            return Result("failed", where_of(test, plan_, reached), ("the result cannot be read",))
    if test.kind == "stdin" and answer["end"] == "exit 0":
        output = base64.b64decode(answer["output"]).decode("utf-8", "replace")
        return Result("passed") if same_output(output, test.expected) else Result("failed", "", stdin_text(test, output))
    return None


def failure(test, plan_, reached, data, code):
    """The Result of a test that ended by an exception: data = {"status", "message", "frames": [[line, name] ...], "got"}."""
    lines = code.split("\n")
    frames = [f"  line {int(n)}, in {shorten(clean_text(str(name)), 60)}: {lines[int(n) - 1].strip()}" for n, name in data["frames"]
              if 0 < int(n) <= len(lines)]
    where = where_of(test, plan_, reached) if data["status"] != "syntax" else ""
    return Result(str(data["status"]), where, (*frames, clean_text(str(data["message"]))))


def where_of(test, plan_, reached):
    """The text of the assert that a test stopped at, or of all of a short test."""
    if test.kind == "call":
        return call_text(test)
    if test.kind == "stdin":
        return f"input: {shorten(test.input.strip(), 200)}"
    return plan_.sites[reached].text if 0 <= reached < len(plan_.sites) else test.code.strip()


def call_text(test):
    return f"{test.entry_point}({', '.join(line for line in test.input.split(chr(10)) if line.strip())})"


def stdin_text(test, output):
    return tuple(f"{name}:\n{shorten(text.strip(), 200)}" for name, text in
                 (("input", test.input), ("expected output", test.expected), ("your output", output)))


def how_it_ended(answer, limits, plan_=None, events=()):
    """The Result of a test in which the process ended: answer["end"] is `exit N`, `signal NAME`, timeout or output."""
    reached = sum(name in ("value", "check") for name, _ in events)
    where = plan_.sites[reached].text if plan_ and reached < len(plan_.sites) else ""
    end = answer["end"]
    if end == "timeout":
        spent = f"{limits.cpu_seconds:g} s of CPU" if answer["spent"] == "cpu" else f"{limits.wall_seconds:g} s"
        return Result("timeout", where, (f"timeout: more than {spent}",))
    if end == "output":
        return Result("error", where, (f"error: more than {limits.output // MIB} MiB of output",))
    if end.startswith("signal") and end != "signal SIGKILL":
        return Result("error", where, (f"error: the program was ended by {end}",))
    return Result("exit", where, ("the program ended before the test did",))


# ---------------------------------------------------------------- the worker: forks a child per job

def main(control):
    """A worker: answers requests on the socket `control` until its other end closes."""
    sys.path.pop(0)  # this folder: no module of ours for the program
    isolated = isolate()
    sys.set_int_max_str_digits(0)
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False), os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    exec(HEADER, header := {})
    gc.freeze()
    while True:
        try:
            request = receive(control)
        except (EOFError, OSError):
            os._exit(0)
        for name in ("numpy", "pytest"):  # once, here, instead of in every child
            if name not in sys.modules and any(name in text for text in (request["code"], *(t["code"] for t in request["tests"]))):
                try:
                    __import__(name)
                except Exception:
                    pass
        send(control, serve(request, control, wake, header, isolated))


HEADER = "\n".join([f"from {name} import *\nimport {name}" for name in (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json typing".split())]
    + ["from builtins import *"])  # last: pow and open stay the built-in ones


def isolate():
    """Namespaces of its own, where the kernel allows; returns whether it did."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    return False


def serve(request, control, wake, header, isolated):
    """Runs one child; returns what it sent and how it ended."""
    folder = tempfile.mkdtemp()
    stdin_kind = request["tests"][0]["kind"] == "stdin"
    pipes = [os.pipe() for _ in range(4)]  # stdin, output, records, proofs
    (in_r, in_w), (out_r, out_w), (rec_r, rec_w), (proof_r, proof_w) = pipes
    try:
        pid = os.fork()
    except OSError as error:
        for fd in sum(pipes, ()):
            os.close(fd)
        os.rmdir(folder)
        return {"end": "infra", "note": f"cannot start a process ({error})"}
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            prepare(request["limits"], folder, in_r, out_w, (in_w, out_r, rec_r, proof_w, wake))
            run_child(request, header, rec_w, proof_r)
        finally:
            os._exit(1)
    for fd in (in_r, out_w, rec_w, proof_r):
        os.close(fd)
    proofs = [os.urandom(16).hex() for _ in request["tests"]]  # made after the fork, so that the child's memory holds none
    os.write(proof_w, "".join(proofs).encode())
    answer = watch(pid, request, control, wake, (in_w, out_r, rec_r), request["tests"][0]["input"].encode("utf-8", "replace") if stdin_kind else b"")
    answer["output"] = answer["output"] if stdin_kind else ""
    os.close(proof_w)
    kill_all(pid)
    shutil.rmtree(folder, ignore_errors=True)
    return answer | {"proofs": proofs}


def watch(pid, request, control, wake, fds, stdin):
    """Feeds and drains a child's pipes until it ends or breaks a limit; closes the pipes."""
    limits, (in_w, out_r, rec_r) = request["limits"], fds
    kept, total, start, end = {out_r: bytearray(), rec_r: bytearray()}, 0, time.monotonic(), ""
    poll = select.poll()
    for fd in (out_r, rec_r, in_w):
        os.set_blocking(fd, False)
    for fd in (out_r, rec_r, wake, control.fileno()):
        poll.register(fd, select.POLLIN)
    poll.register(in_w, select.POLLOUT)
    sent, open_in, cpu, idle, spent, status = 0, True, 0.0, 0.0, "", None
    while not end:
        wait = min((limits["cpu_seconds"] - cpu) / (os.cpu_count() or 1), limits["wall_seconds"] - idle)
        ready = poll.poll(max(10, wait * 1000))
        for fd, event in ready:
            if fd == control.fileno():
                kill_all(pid)
                os._exit(0)
            elif fd == wake:
                os.read(wake, 4096)
            elif fd == in_w:
                try:
                    sent += os.write(in_w, stdin[sent:sent + 65536]) if sent < len(stdin) else 0
                except OSError:
                    sent = len(stdin)
                if sent >= len(stdin):
                    poll.unregister(in_w)
                    os.close(in_w)
                    open_in = False
            else:
                data = read_some(fd)
                kept[fd] += data
                total += len(data)
                if not data:
                    poll.unregister(fd)
        done, status, usage = os.wait4(pid, os.WNOHANG)
        cpu = usage.ru_utime + usage.ru_stime if done else cpu_of(pid)
        idle = time.monotonic() - start - 3 * cpu
        if total > limits["output"]:
            end = "output"
        elif cpu >= limits["cpu_seconds"] or idle >= limits["wall_seconds"]:
            end, spent = "timeout", "cpu" if cpu >= limits["cpu_seconds"] else "wall"
        elif done:
            end = f"exit {os.WEXITSTATUS(status)}" if os.WIFEXITED(status) else f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    for fd in (out_r, rec_r):
        while len(data := read_some(fd)) and len(kept[fd]) < limits["output"]:
            kept[fd] += data
        os.close(fd)
    if open_in:
        os.close(in_w)
    return {"end": end, "spent": spent, "cpu": cpu, "idle": max(0, idle), "records": kept[rec_r].decode("utf-8", "replace"),
            "output": base64.b64encode(kept[out_r]).decode()}


def read_some(fd):
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


def cpu_of(pid):
    """CPU seconds that a process has used."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of another process: see clock_getcpuclockid(3)
    except OSError:
        return 0.0


def kill_all(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for other in os.listdir("/proc"):
                    if other.isdigit():
                        try:
                            with open(f"/proc/{other}/stat") as file:
                                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                                    os.kill(int(other), signal.SIGKILL)
                        except OSError:
                            pass
                time.sleep(0.001)
        except ChildProcessError:
            return


# ---------------------------------------------------------------- the child: runs the program and its tests

def prepare(limits, folder, stdin, stdout, close):
    os.setsid()
    for fd in close:
        os.close(fd)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.close(stdin)
    os.close(stdout)
    os.chdir(folder)
    os.environ["TMPDIR"] = folder
    cpu = math.ceil(limits["cpu_seconds"]) + 1
    for name, value in (("AS", limits["memory"]), ("FSIZE", limits["files"]), ("NOFILE", limits["open_files"]), ("CORE", 0), ("CPU", cpu)):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", encoding="utf-8", errors="surrogateescape", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["solution.py"]


def run_child(request, header, records, proofs):
    """Runs the program, then its tests; what happens is written to the descriptor `records`."""
    tests, write, dumps = request["tests"], os.write, json.dumps
    whole = tests[0]["kind"] == "stdin"
    originals, restore = dict(vars(builtins)), vars(builtins).update

    def emit(*record):
        data = f"\n{dumps(record)}\n".encode()
        while data:
            data = data[write(records, data):]

    name = "__main__" if whole else "solution"
    module = types.ModuleType(name)
    space = vars(module)
    if whole or any(test["kind"] == "call" for test in tests):
        space.update({k: v for k, v in header.items() if k != "__builtins__"})
        space.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr, __name__=name)
        sys.setrecursionlimit(50_000)
    sys.modules["__main__"] = sys.modules[name] = module
    try:
        exec(compile(request["code"], "solution.py", "exec", dont_inherit=True), space)
    except BaseException as error:
        if not (whole and isinstance(error, SystemExit)):
            for i in range(len(tests)):
                emit("fail", i, explain(error))
            os._exit(0)
    if whole:
        threading._shutdown()
        import atexit
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
    emit("loaded", 0)
    for i, test in enumerate(tests):
        restore(originals)
        sys.settrace(None)
        sys.setprofile(None)
        try:
            run_test(i, test, space, emit, lambda: restore(originals))
        except BaseException as error:
            emit("fail", i, explain(error))
            os.read(proofs, 32)
        else:
            emit("done", i, os.read(proofs, 32).decode())
    os._exit(0)


def run_test(i, test, space, emit, restore):
    """Runs one test; returns if it came to its end."""
    def report(site, value):
        restore()
        emit("value", i, site, encode(value))

    def check(site, value):
        restore()
        if value:
            emit("check", i, site)
        return value

    helpers = {"__report__": report, "__check__": check, "__equal__": equal, "__truth__": bool}
    if test["kind"] == "call":
        function = space[test["entry_point"]] if test["entry_point"] in space else getattr(space["Solution"](), test["entry_point"])
        emit("result", i, encode(function(*(json.loads(line) for line in test["input"].split("\n") if line.strip()))))
        return
    if test["kind"] == "pytest":
        space = dict(space, __name__="test_solution")
    space.update(helpers)
    exec(compile(test["code"], "test.py", "exec", dont_inherit=True), space)
    if test["kind"] == "check":
        space["check"](space[test["entry_point"]])
    elif test["kind"] == "pytest":
        run_pytest(space)


def run_pytest(space):
    """Calls the test functions, and the test methods of Test classes, with their parametrized arguments."""
    for name, thing in list(space.items()):
        if name.startswith("Test") and isinstance(thing, type):
            for method in [m for m in vars(thing) if m.startswith("test")]:
                call_test(getattr(thing(), method))
        elif name.startswith("test") and isinstance(thing, types.FunctionType):
            call_test(thing)


def call_test(function):
    calls = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
            rows = [getattr(row, "values", row) if not isinstance(row, dict) else row for row in rows]
            rows = [row if len(names) > 1 or hasattr(row, "_fields") else [row] for row in rows]
            calls = [call | dict(zip(names, row)) for call in calls for row in rows]
    for call in calls:
        function(**call)


def equal(a, b):
    """a == b, decided by built-in parts where one side is plain data and the other an object with an __eq__ of the program."""
    return a == b


def explain(error):
    """What to tell of an exception: status, message, and the program's own frames."""
    frames, trace = [], error.__traceback__
    last = ""
    while trace:
        last = trace.tb_frame.f_code.co_filename
        if last == "solution.py":
            frames.append([trace.tb_lineno, trace.tb_frame.f_code.co_name])
        trace = trace.tb_next
    kind = type(error).__name__
    try:
        message = f"{kind}: {error}"[:4000] if str(error) else kind
    except Exception:
        message = kind
    status = "error"
    if isinstance(error, MemoryError):
        status = "memory"
    elif isinstance(error, SystemExit):
        status, message = "exit", "the program ended before the test did"
    elif isinstance(error, (SyntaxError, UnicodeEncodeError)) and not frames and last != "test.py":
        status, message = "syntax", f"{kind}: {getattr(error, 'msg', error)} (line {getattr(error, 'lineno', 0)})"
    elif last == "test.py" and (isinstance(error, AssertionError) or kind == "Failed"):
        status = "failed"
    return {"status": status, "message": message, "frames": frames[-3:]}


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
