"""Executor: run untrusted programs against tests in limited processes, and say what failed in words.

    with Executor(workers=2) as executor:
        [verdict] = executor.run([("def f(x): return x", [Test("assert", "assert f(1) == 2")])])
        verdict.reward, verdict.status, verdict.feedback()

How: a worker is a fresh interpreter (exec, so it inherits no CUDA state, no memory and no secrets) that has the usual modules
loaded and forks a child per run. Expected values stay with the parent: of `assert f(3) == 7` the child sees f(3) alone and
sends back its value in a data-only form; the parent compares. Only tests of other forms (loops, helpers, pytest.raises) are
judged in the child, and each must prove its end with a token that the child reads from a pipe after the last statement.

What it stops: endless loops, sleepers, memory and output floods, fork bombs, exits taken for passes, forged output, walked
frames, always-equal objects, patched builtins, files read or left behind, orphans, and, where the kernel allows namespaces
(a note is printed once where not), the network, writes outside a private folder, and signals to other processes.
What it does not: a program that hunts for the token's pipe can forge a test that is judged in the child; kernel exploits;
reading world-readable files. For hostile rather than merely wrong programs run the whole trainer in a container or gVisor.
Left out: other languages, other systems than Linux, and a cap on the CPU time of a program's own children (wall time ends them).
"""
import ast
import ctypes
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Limits:
    """Of one run of a program; all tests of a job share a run, but every stdin test is a run of its own."""
    cpu_seconds: float = 10.0          # CPU first: a busy machine must not fail an honest program
    wall_seconds: float = 20.0         # the wider net, for programs that sleep
    memory_bytes: int = 2**30          # address space of each process
    output_bytes: int = 16 * 2**20     # stdout, and stderr; more ends the run
    file_bytes: int = 64 * 2**20       # of one file, and of the whole working folder where it is a mount of its own
    open_files: int = 256
    processes: int = 64                # and threads


# ---------------------------------------------------------------- verdicts

@dataclass
class Verdict:
    """Of one job: per test, whether it passed, a status (passed | failed | error | timeout | memory | exit | syntax | infra)
    and the words that feedback may show."""
    passed: list[bool]
    status: list[str]
    details: list[str]
    public: list[bool] = field(default_factory=list)

    @property
    def reward(self):
        """Share of tests passed, in [0, 1]."""
        return sum(self.passed) / len(self.passed) if self.passed else 0.0

    @property
    def infra(self):
        """True if the harness, not the program, failed on a test: then there is no reward."""
        return "infra" in self.status

    def visible(self):
        """The verdict on the public tests alone."""
        kept = [i for i, shown in enumerate(self.public) if shown]
        pick = lambda values: [values[i] for i in kept]
        return Verdict(pick(self.passed), pick(self.status), pick(self.details), pick(self.public))

    def feedback(self, max_chars=1000):
        """For the model: how many tests passed, and the first failure. At most max_chars characters; the same words every run."""
        text = f"Passed {sum(self.passed)} of {len(self.passed)} tests."
        if all(self.passed):
            return text[:max_chars]
        head = text + "\nFirst failure:\n"
        return (head + shorten(self.details[self.passed.index(False)], max(max_chars - len(head), 0)))[:max_chars]

    def to_json(self):
        return asdict(self)


def shorten(text, limit):
    """Cut in the middle, with a mark; both ends matter (the test's source first, the error's message last)."""
    mark = " ... "
    if len(text) <= limit:
        return text
    if limit <= len(mark) + 2:
        return text[:max(limit, 0)]
    head = (limit - len(mark)) // 3
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head):]


def tidy(text):
    """No addresses, no lone surrogates: words that do not differ between runs and can be written anywhere."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text).encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- plans: what the child does, what the parent compares

PURE = {f.__name__: f for f in (abs, all, any, bool, complex, dict, float, frozenset, int, isinstance, len, list, max, min, round, set,
                                sorted, str, sum, tuple)} | {"math": __import__("math"), "True": True, "False": False, "None": None}
CALM = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Call, ast.keyword,
        ast.Attribute, ast.Subscript, ast.Slice, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)


NOT_DATA = (ast.Starred, ast.Lambda, ast.GeneratorExp, ast.Attribute)  # as arguments: only the child can make sense of them


class Holes(ast.NodeTransformer):
    """Replaces every maximal part that the child must evaluate by a name _0, _1, ...; the rest is for the parent."""
    def __init__(self):
        self.sources = []

    def hole(self, node):
        self.sources.append(ast.unparse(node))
        return ast.Name(f"_{len(self.sources) - 1}", ast.Load())

    def visit_Call(self, node):
        name = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        pure = isinstance(name, ast.Name) and name.id in PURE and (name is node.func or name.id == "math")
        arguments = node.args + [k.value for k in node.keywords]
        if not pure or any(isinstance(a, NOT_DATA) or isinstance(a, ast.Name) and a.id not in PURE for a in arguments):
            return self.hole(node)
        node.args = [self.visit(a) for a in node.args]
        node.keywords = [self.visit(k) for k in node.keywords]
        return node

    def visit_Name(self, node):
        return node if node.id in PURE else self.hole(node)

    def visit_Attribute(self, node):
        return node if isinstance(node.value, ast.Name) and node.value.id == "math" else self.hole(node)

    def generic_visit(self, node):
        return super().generic_visit(node) if isinstance(node, CALM) else self.hole(node)


def bounded(condition):
    """No powers or repetitions that would make the parent work: `2**10**9` in a test is the child's."""
    return not any(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Pow, ast.Mult, ast.LShift)) and
                   any(isinstance(c, ast.Constant) and isinstance(c.value, (int, float)) and abs(c.value) > 10**4 for c in ast.walk(n.right))
                   for n in ast.walk(condition))


def split_condition(condition):
    """(sources for the child, code for the parent, pair of codes to show as expected and got, or None); None if it does not split."""
    holes = Holes()
    rest = holes.visit(ast.parse(ast.unparse(condition), mode="eval").body)
    if not holes.sources or isinstance(rest, ast.Name) and not isinstance(condition, (ast.Call, ast.Name)) or not bounded(rest):
        return None
    compiled = lambda node: compile(ast.fix_missing_locations(ast.Expression(node)), "<test>", "eval")
    shown = None
    if isinstance(rest, ast.Compare) and len(rest.ops) == 1 and isinstance(rest.ops[0], (ast.Eq, ast.Is)):
        sides = rest.left, rest.comparators[0]
        got_left = any(isinstance(n, ast.Name) and n.id.startswith("_") for n in ast.walk(sides[0]))
        shown = (compiled(sides[1]), compiled(sides[0])) if got_left else (compiled(sides[0]), compiled(sides[1]))
    return holes.sources, compiled(rest), shown


def steps_of(statements):
    """Straight-line statements -> (steps for the child, parent's judges, test sources), or None where they do not split."""
    steps, judges = [], []
    for node in statements:
        if isinstance(node, ast.Assert):
            split = split_condition(node.test)
            if split is None:
                return None
            steps.append(["eval", split[0]])
            judges.append((split[1], split[2], ast.unparse(ast.Assert(node.test, None))))
        elif any(isinstance(n, (ast.Assert, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)) for n in ast.walk(node)):
            return None
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            steps.append(["exec", ast.unparse(node)])
    return steps, judges


def plan(test):
    """(message for the child, parent's judges or None) of one test. Tests that do not split are sent whole."""
    if test.kind == "stdin":
        return {"mode": "stdin", "input": test.input}, None
    if test.kind == "call":
        return {"mode": "call", "entry": test.entry_point, "args": test.input.splitlines()}, None
    whole = {"mode": "whole", "kind": test.kind, "code": test.code, "entry": test.entry_point}
    try:
        body = ast.parse(test.code.replace("\r\n", "\n")).body
    except (SyntaxError, ValueError):
        return whole, None
    if test.kind == "assert":
        split = steps_of(body)
        return ({"mode": "steps", "kind": "assert", "code": "", "steps": split[0]}, split[1]) if split else (whole, None)
    names = [n for n in body if isinstance(n, ast.FunctionDef) and (n.name == "check" if test.kind == "check" else n.name.startswith("test"))]
    simple = [n for n in names if not n.decorator_list and len(n.args.args) == (test.kind == "check") and not n.args.defaults]
    if len(names) != 1 or not simple:
        return whole, None
    split = steps_of(simple[0].body)
    if split is None or test.kind == "pytest" and any(isinstance(n, ast.ClassDef) for n in body):
        return whole, None
    rest = "\n".join(ast.unparse(n) for n in body if n is not simple[0])
    candidate = simple[0].args.args[0].arg if test.kind == "check" else ""
    return {"mode": "steps", "kind": test.kind, "code": rest, "entry": test.entry_point, "candidate": candidate, "steps": split[0]}, split[1]


# ---------------------------------------------------------------- judging, in the parent

def plain(value):
    """The value that a child sent in its data-only form. Raises ValueError for anything else."""
    kind, content = value
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind in ("str", "bool", "none"):
        return {"str": str, "bool": bool, "none": lambda _: None}[kind](content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(plain(content[0]), plain(content[1]))
    if kind == "dict":
        return {plain(k): plain(v) for k, v in content}
    if kind in ("list", "tuple", "set", "frozenset"):
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](plain(v) for v in content)
    if kind == "object":
        return Opaque(content)
    raise ValueError(kind)


class Opaque:
    """Stands for an object of the program's own class: equal to nothing, true, shown by its text."""
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def shown_value(value):
    try:
        return tidy(shorten(repr(value), 300))
    except ValueError:  # an integer of over 4,300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "a value too long to show"


def judge(test, judges, message):
    """(status, words) of one test from the child's message {"error": ...} or {"values": [...]} and so on."""
    source = test_source(test)
    if "error" in message:
        return message["error"], f"{source}\n{tidy(message['text'])}"
    try:
        if test.kind == "stdin":
            return judge_output(test, message["output"])
        values = [[plain(v) for v in step] for step in message["values"]]
        if test.kind == "call":
            return judge_call(test, values[0][0], source)
        for (condition, shown, words), step in zip(judges or [], values, strict=True):
            scope = {"__builtins__": {}} | PURE | {f"_{i}": v for i, v in enumerate(step)}
            if not eval(condition, scope):
                pair = f"expected {shown_value(eval(shown[0], scope))}, got {shown_value(eval(shown[1], scope))}" if shown else ""
                return "failed", f"{words}\n{pair or 'the condition is false; got ' + ', '.join(map(shown_value, step))}"
        return "passed", ""
    except Exception as error:  # a comparison that plain values refuse, as 1 < None
        return "failed", f"{source}\n{type(error).__name__}: {tidy(shorten(str(error), 300))}"


def test_source(test):
    if test.kind == "stdin":
        return f"input:\n{shorten(test.input.strip(), 300)}"
    if test.kind == "call":
        return f"{test.entry_point}({', '.join(shorten(a, 100) for a in test.input.splitlines())})"
    return shorten(test.code.strip(), 600) if test.kind != "check" else f"check({test.entry_point})"


def judge_call(test, got, source):
    """LiveCodeBench: an outer tuple counts as a list; then equal to the JSON value."""
    expected = json.loads(test.expected)
    got = list(got) if isinstance(got, tuple) else got
    ok = got == expected and not isinstance(got, Opaque)
    return ("passed", "") if ok else ("failed", f"{source}\nexpected {shown_value(expected)}, got {shown_value(got)}")


def judge_output(test, output):
    """LiveCodeBench: as many lines after strip(); each equal after strip(), or token by token equal as decimals."""
    from decimal import Decimal, InvalidOperation
    wanted, got = (text.strip().split("\n") for text in (test.expected, output))

    def same(a, b):
        if a.strip() == b.strip():
            return True
        try:
            return [Decimal(t) for t in a.split()] == [Decimal(t) for t in b.split()]
        except (InvalidOperation, ValueError):
            return False
    if len(wanted) == len(got) and all(map(same, wanted, got)):
        return "passed", ""
    return "failed", (f"{test_source(test)}\nexpected output:\n{shorten(test.expected.strip(), 300)}\n"
                      f"your output:\n{tidy(shorten(output.strip(), 300))}")


# ---------------------------------------------------------------- the executor, in the parent

class WorkerLost(Exception):
    """A worker died or did not answer."""


class Executor:
    """A pool of workers. run() may be called from any thread, again and again; close() or `with` ends the workers."""
    def __init__(self, workers=None, limits=Limits()):
        self.limits = limits
        self.workers = workers or len(os.sched_getaffinity(0))
        self.pool, self.lock = [None] * self.workers, threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for worker in filter(None, self.pool):
            worker.stop()
        self.pool = [None] * self.workers

    def run(self, jobs):
        """jobs: list of (program, list of Test). Returns a list of Verdict in the order of the jobs.

        Raises ValueError for a job without tests (it could only be a free pass).
        """
        for i, (_, tests) in enumerate(jobs):
            if not tests:
                raise ValueError(f"job {i} has no tests, so it cannot be judged; give at least one Test")
        with self.lock:
            verdicts, todo = [None] * len(jobs), iter(range(len(jobs)))
            take = threading.Lock()

            def serve(slot):
                while True:
                    with take:
                        i = next(todo, None)
                    if i is None:
                        return
                    verdicts[i] = self.run_job(slot, *jobs[i])
            threads = [threading.Thread(target=serve, args=(slot,)) for slot in range(min(self.workers, len(jobs)))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return verdicts

    def run_job(self, slot, code, tests):
        if not code.strip():
            return Verdict([False] * len(tests), ["syntax"] * len(tests), ["No Python code was found in the answer."] * len(tests),
                           [t.public for t in tests])
        plans = [plan(test) for test in tests]
        request = {"code": code, "tests": [p[0] for p in plans], "limits": asdict(self.limits)}
        messages = [{"error": "infra", "text": "the executor failed on this program"}] * len(tests)
        for _ in range(2):  # a fault of the harness is retried once, then said
            try:
                self.pool[slot] = self.pool[slot] or Worker()
                messages = self.pool[slot].ask(request, self.limits)
                break
            except (WorkerLost, OSError):
                if self.pool[slot]:
                    self.pool[slot].stop()
                self.pool[slot] = None
        judged = [judge(t, p[1], m) for t, p, m in zip(tests, plans, messages)]
        return Verdict([s == "passed" for s, _ in judged], [s for s, _ in judged], [w for _, w in judged], [t.public for t in tests])


ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace", "CUDA_VISIBLE_DEVICES": "",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # an allow-list: no tokens, no keys


class Worker:
    """The parent's end of one worker process."""
    noted = False

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="murphy-")
        ours, theirs = socket.socketpair()
        self.socket = ours
        environment = ENVIRONMENT | {k: os.environ[k] for k in ("LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if k in os.environ}
        self.process = subprocess.Popen([sys.executable, "-s", "-P", os.path.abspath(__file__), "--worker", str(theirs.fileno()), self.folder],
                                        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, env=environment, cwd="/", start_new_session=True)
        theirs.close()
        self.socket.settimeout(60)
        self.isolated = receive(self.socket)["isolated"]
        if not self.isolated and not Worker.noted:
            Worker.noted = True
            print("note: this system allows no namespaces; programs run with the network and the files of this user", file=sys.stderr)

    def ask(self, request, limits):
        """The child's messages, one per test. Raises WorkerLost."""
        runs = 1 + sum(t["mode"] == "stdin" for t in request["tests"])
        self.socket.settimeout(30 + (limits.wall_seconds + 1) * runs)
        try:
            send(self.socket, request)
            return receive(self.socket)
        except (OSError, EOFError, ValueError) as error:
            raise WorkerLost(str(error)) from None

    def stop(self):
        self.socket.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            pass
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def send(connection, message):
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!Q", len(data)) + data)


def receive(connection):
    def exactly(count):
        parts = []
        while count:
            part = connection.recv(min(count, 2**20))
            if not part:
                raise EOFError("the other side is gone")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
    return json.loads(exactly(struct.unpack("!Q", exactly(8))[0]))


# ---------------------------------------------------------------- the worker: one fresh interpreter, forks a child per run

PREAMBLE = ("import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator, io, sys, "
            "json\nfrom string import *\nfrom re import *\nfrom collections import *\nfrom heapq import *\nfrom bisect import *\n"
            "from copy import *\nfrom math import *\nfrom statistics import *\nfrom itertools import *\nfrom functools import *\n"
            "from operator import *\nfrom typing import *\nfrom datetime import *\nfrom builtins import *\n")  # builtins last: pow stays pow
NEW = dict(user=0x10000000, pid=0x20000000, net=0x40000000, ipc=0x08000000, mount=0x00020000)


def isolate(folder, size):
    """Namespaces of our own: user, process ids, network, IPC, mounts; a read-only system and a small private folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to us, also without a pid namespace
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NEW["user"] | NEW["pid"] | NEW["net"] | NEW["ipc"] | NEW["mount"]):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    libc.mount(None, b"/", None, 0x44000, None)  # changes stay in this namespace
    with open("/proc/self/mounts", "rb") as file:
        for line in file.read().splitlines():
            point, flags = line.split()[1].decode("unicode_escape").encode(), line.split()[3].split(b",")
            locked = sum(bit for name, bit in ((b"nosuid", 2), (b"nodev", 4), (b"noexec", 8), (b"noatime", 1024), (b"relatime", 1 << 21)) if name in flags)
            libc.mount(None, point, None, 0x1021 | locked, None)  # read-only
    options = f"size={size},mode=700".encode()
    libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 6, options)
    return libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, options) == 0


def worker(descriptor, folder):
    """Serve requests until the parent closes the connection."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    try:
        isolated = isolate(folder, Limits.file_bytes)
    except OSError:
        isolated = False
    if isolated:  # the first child is process 1 of the new namespace: when it ends, all in it end
        child = os.fork()
        if child:
            connection.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the parent
        libc.mount(b"proc", b"/proc", b"proc", 14, None)  # where this is refused, /proc shows the system's processes
    exec(PREAMBLE, {})
    try:
        import pytest  # the real one, so that raises, approx and parametrize mean what they say
    except ImportError:
        pass
    send(connection, {"isolated": isolated})
    while True:
        try:
            request = receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        reply = Job(request, folder, isolated, connection.fileno()).results()
        send(connection, reply)


class Job:
    """One request in the worker: runs children until every test has a message."""
    def __init__(self, request, folder, isolated, keep_out):
        self.code, self.tests, self.limits = request["code"], request["tests"], Limits(**request["limits"])
        self.folder, self.isolated, self.keep_out = folder, isolated, keep_out
        self.messages = [None] * len(self.tests)
        self.cpu, self.deadline = self.limits.cpu_seconds, None

    def results(self):
        try:
            compile(self.code, "<solution>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, UnicodeError, RecursionError, MemoryError, OverflowError) as error:
            line = getattr(error, "lineno", None)
            words = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}" + (f" (line {line})" if line else "")
            return [{"error": "syntax", "text": words}] * len(self.tests)
        while None in self.messages:
            first = self.messages.index(None)
            alone = self.tests[first]["mode"] == "stdin"
            if alone or self.deadline is None:
                self.cpu, self.deadline = self.limits.cpu_seconds, time.monotonic() + self.limits.wall_seconds
            batch = [first] if alone else [i for i in range(first, len(self.tests)) if self.messages[i] is None and self.tests[i]["mode"] != "stdin"]
            ending = self.run_child(batch)
            left = [i for i in batch if self.messages[i] is None]
            if left:  # the child ended inside the first test that has no message
                self.messages[left[0]] = ending
                if ending["error"] in ("timeout", "infra") or not self.loaded:
                    for i in left[1:]:
                        self.messages[i] = ending
            if ending["error"] == "timeout" and alone:  # the rest would take as long again
                self.messages = [m or ending for m in self.messages]
        return self.messages

    def run_child(self, batch):
        """Fork, watch, clean up. Returns the message for the test in which the child ended, if it ended early."""
        home = os.path.join(self.folder, "run")
        os.mkdir(home, 0o700)
        pipes = {name: os.pipe() for name in ("results", "out", "err", "in", "tokens")}
        self.tokens = [os.urandom(16) for _ in batch]
        os.write(pipes["tokens"][1], b"".join(self.tokens))
        pid = os.fork()
        if pid == 0:
            try:
                child(self, batch, pipes, home)
            finally:
                os._exit(1)
        for name in ("results", "out", "err", "tokens"):
            os.close(pipes[name][1 if name != "tokens" else 0])
        os.close(pipes["tokens"][1]), os.close(pipes["in"][0])
        try:
            return Watch(self, pid, batch, pipes).ending()
        finally:
            self.clean(home)

    def clean(self, home):
        """Kill and reap whatever the child left, then its files."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL) if self.isolated else kill_children()
            except ProcessLookupError:
                pass
            try:
                while os.waitpid(-1, 0 if self.isolated else os.WNOHANG)[0]:
                    pass
                time.sleep(0.001)
            except ChildProcessError:
                break
        for folder in [home] + [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if self.isolated]:
            shutil.rmtree(folder, ignore_errors=True)


def kill_children():
    """Without a process namespace: kill every process whose parent we are, orphans included (we are their reaper)."""
    me = os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[1]) == me:
                    os.kill(int(name), signal.SIGKILL)
        except OSError:
            pass


class Watch:
    """Reads a child's pipes until it is done or a limit is passed."""
    def __init__(self, job, pid, batch, pipes):
        self.job, self.pid, self.batch, self.pipes = job, pid, batch, pipes
        self.buffers, self.sizes = {"results": b"", "out": b"", "err": b""}, {"out": 0, "err": 0}
        self.done = self.exited = False
        job.loaded = False

    def ending(self):
        stdin = self.job.tests[self.batch[0]]["mode"] == "stdin"
        limits, poll = self.job.limits, select.poll()
        read = {self.pipes[name][0]: name for name in ("results", "out", "err")}
        for descriptor in read:
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLIN)
        text = self.job.tests[self.batch[0]].get("input", "").encode("utf-8", "replace") if stdin else b""
        writer, exit_fd = self.pipes["in"][1], os.pidfd_open(self.pid)
        os.set_blocking(writer, False)
        poll.register(exit_fd, select.POLLIN)
        writer_open, failure = True, None
        if text:
            poll.register(writer, select.POLLOUT)
        else:
            os.close(writer)
            writer_open = False
        while not self.done and not self.exited and not failure:
            for descriptor, _ in poll.poll(50):
                if descriptor == exit_fd:
                    self.exited = True
                elif writer_open and descriptor == writer:
                    try:
                        text = text[os.write(writer, text[:65536]):]
                    except BlockingIOError:
                        pass
                    except OSError:
                        text = b""
                    if not text:
                        poll.unregister(writer)
                        os.close(writer)
                        writer_open = False
                else:
                    self.read(descriptor, read[descriptor], poll)
            failure = self.over_limits()
        if self.exited:
            for descriptor, name in read.items():
                self.read(descriptor, name, poll)
            failure = failure or self.over_limits(ended=True)
        used = cpu_seconds(self.pid)
        self.job.cpu -= used
        for descriptor in list(read) + [exit_fd] + [writer] * writer_open:
            os.close(descriptor)
        return self.message(failure, stdin)

    def read(self, descriptor, name, poll):
        while True:
            try:
                data = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            if not data:
                try:
                    poll.unregister(descriptor)
                except KeyError:
                    pass
                return
            if name == "results":
                self.results(data)
                if self.done:
                    return
            else:
                self.sizes[name] += len(data)
                if self.sizes[name] <= self.job.limits.output_bytes:
                    self.buffers[name] = self.buffers[name] + data if name == "out" else (self.buffers[name] + data)[-8192:]
            if name != "results" and self.sizes[name] > self.job.limits.output_bytes:
                return

    def results(self, data):
        self.buffers["results"] += data
        *lines, self.buffers["results"] = self.buffers["results"].split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                json.dumps(message)  # what is nested too deep for this is noise
                if message.get("loaded"):
                    self.job.loaded = True
                elif message.get("end"):
                    self.done = True
                else:
                    self.accept(message, self.batch.index(message.pop("test")))
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                continue  # noise written by the program

    def accept(self, message, position):
        """The first message of a test counts, and all but an error need its token."""
        if "error" not in message and message.get("proof") != self.job.tokens[position].hex():
            message = {"error": "error", "text": "the test did not end as a test does"}
        if self.job.messages[self.batch[position]] is None:
            self.job.messages[self.batch[position]] = message

    def over_limits(self, ended=False):
        limits = self.job.limits
        if max(self.sizes.values()) > limits.output_bytes:
            return {"error": "memory", "text": f"output: more than {limits.output_bytes >> 20} MiB"}
        if len(self.buffers["results"]) > 64 * 2**20:
            return {"error": "memory", "text": "the result is too large"}
        if cpu_seconds(self.pid) > self.job.cpu:
            return {"error": "timeout", "text": f"timeout: more than {limits.cpu_seconds:g} s of CPU"}
        if not ended and time.monotonic() > self.job.deadline:
            return {"error": "timeout", "text": f"timeout: more than {limits.wall_seconds:g} s"}

    def message(self, failure, stdin):
        code = None
        if self.exited:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            if code in (-signal.SIGXCPU,):
                failure = {"error": "timeout", "text": f"timeout: more than {self.job.limits.cpu_seconds:g} s of CPU"}
        if failure:
            return failure
        if stdin and code == 0 and self.job.messages[self.batch[0]] is None:
            self.job.messages[self.batch[0]] = {"output": self.buffers["out"].decode("utf-8", "replace")}
            return {"error": "none", "text": ""}
        if code is not None and code < 0:
            if code == -signal.SIGKILL:
                return {"error": "memory", "text": "the program was killed"}
            return {"error": "error", "text": f"the program crashed: {signal.Signals(-code).name}"}
        if stdin:
            tail = self.buffers["err"].decode("utf-8", "replace").strip().splitlines()[-4:]
            return {"error": "error", "text": f"the program ended with exit code {code}" + "".join("\n" + t for t in tail)}
        return {"error": "exit", "text": "the program ended before the test did"}


def cpu_seconds(pid):
    """CPU time of a process; 0.0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock of another process, as clock_getcpuclockid makes it
    except OSError:
        return 0.0


# ---------------------------------------------------------------- the child: the program's own process

def child(job, batch, pipes, home):
    """Run the tests of a batch and write one line of JSON for each; never returns."""
    results, tokens = enter(job, pipes, home)
    write, read, leave = os.write, os.read, os._exit  # ours, whatever the program does to the module

    def say(message):
        data = json_text(message).encode() + b"\n"
        while data:
            data = data[write(results, data):]
    first = job.tests[batch[0]]
    if first["mode"] == "stdin":
        run_main(job.code, leave)
    space = load(job, batch, say, bool(first["mode"] == "call"))
    if space is None:
        leave(0)
    say({"loaded": True})
    for i in batch:
        try:
            message = {"values": run_test(job.tests[i], space)}
        except BaseException as error:
            message = failure(error, home, job.code)
        message["proof"] = read(tokens, 16).hex()
        say({"test": i} | message)
    say({"end": True})
    leave(0)


json_text = json.JSONEncoder().encode


def enter(job, pipes, home):
    """Session, folder, limits and descriptors of the child. Returns the descriptors of results and tokens."""
    os.setsid()
    os.chdir(home)
    os.environ.update(HOME=home, TMPDIR=home)
    results, tokens = os.dup2(pipes["results"][1], 250), os.dup2(pipes["tokens"][0], 251)
    os.dup2(pipes["in"][0], 0), os.dup2(pipes["out"][1], 1), os.dup2(pipes["err"][1], 2)
    os.closerange(3, 250)
    os.closerange(252, 4096)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, encoding="utf-8", errors="replace", closefd=False)
                                         for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    sys.argv = ["solution.py"]
    sys.set_int_max_str_digits(0)
    limits = job.limits
    cpu = max(1, int(job.cpu + 0.999))
    for name, value in (("CPU", cpu), ("AS", limits.memory_bytes), ("FSIZE", limits.file_bytes), ("NOFILE", limits.open_files),
                        ("NPROC", limits.processes), ("CORE", 0)):
        number = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, min(value + 1, hard) if name == "CPU" and hard != resource.RLIM_INFINITY else value + (name == "CPU")))
    return results, tokens


def load(job, batch, say, preamble):
    """Run the program as the module `solution`. Returns its namespace, or None after saying for each test why there is none."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        if preamble:
            exec(PREAMBLE, module.__dict__)
        exec(compile(job.code, "<solution>", "exec", dont_inherit=True), module.__dict__)
        return module.__dict__
    except BaseException as error:
        message = failure(error, os.environ.get("HOME", ""), job.code)
        for i in batch:
            say({"test": i} | message)
        say({"end": True})


def run_main(code, leave):
    """A stdin program: the module __main__, with its exit code; threads are waited for and exit handlers run, as in a real run."""
    import atexit
    module, status = types.ModuleType("__main__"), 0
    sys.modules["__main__"] = module
    exec(PREAMBLE, module.__dict__)
    try:
        exec(compile(code, "<solution>", "exec", dont_inherit=True), module.__dict__)
        threading._shutdown()
    except SystemExit as error:
        status = 0 if error.code in (None, 0) else 1
    except BaseException as error:
        status = 1
        sys.stderr.write(failure(error, os.environ.get("HOME", ""), code)["text"])
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    leave(status)


def run_test(test, space):
    """Values for the parent to judge, a list per judged assert; raises what the test raises."""
    if test["mode"] == "call":
        owner = space["Solution"]() if "Solution" in space and hasattr(space["Solution"], test["entry"]) else None
        function = getattr(owner, test["entry"]) if owner is not None else space[test["entry"]]
        return [[encode(function(*map(json.loads, test["args"])))]]
    if test["kind"] != "assert":
        space = dict(space, __name__="test_solution")
    if test["mode"] == "whole":
        exec(compile(test["code"], "<test>", "exec", dont_inherit=True), space)
        if test["kind"] == "check":
            space["check"](space[test["entry"]])
        elif test["kind"] == "pytest":
            run_pytest(space)
        return []
    exec(compile(test["code"], "<test>", "exec", dont_inherit=True), space)
    if test.get("candidate"):
        space[test["candidate"]] = space[test["entry"]]
    values = []
    for action, source in test["steps"]:
        if action == "exec":
            exec(compile(source, "<test>", "exec", dont_inherit=True), space)
        else:
            values.append([encode(eval(compile(part, "<test>", "eval", dont_inherit=True), space)) for part in source])
    return values


def run_pytest(space):
    """Every test_* function, and every test_* method of a Test* class; parametrize is unrolled. Fixtures are not supported."""
    functions = [f for name, f in list(space.items()) if name.startswith("test") and callable(f) and getattr(f, "__module__", "") == "test_solution"]
    for name, kind in list(space.items()):
        if name.startswith("Test") and isinstance(kind, type):
            functions += [getattr(kind(), m) for m in dir(kind) if m.startswith("test")]
    if not functions:
        raise AssertionError("the test holds no test function")
    for function in functions:
        for arguments in parametrized(getattr(function, "pytestmark", [])):
            function(**arguments)


def parametrized(marks):
    cases = [{}]
    for mark in marks:
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
            rows = [getattr(row, "values", row) if not isinstance(row, dict) else row for row in rows]
            rows = [dict(zip(names, row if len(names) > 1 or type(row).__name__ == "ParameterSet" else [row])) for row in rows]
            cases = [case | row for case in cases for row in rows]
    return cases


def encode(value, depth=0):
    """A value in data-only form, by its built-in content: what a subclass says of itself does not count."""
    if value is None or value is True or value is False:
        return ["none", 0] if value is None else ["bool", value]
    inner = lambda values: [encode(v, depth + 1) for v in values]
    kind = type(value)
    if depth < 100:
        for base, form in FORMS:
            if isinstance(value, base) and issubclass(kind, base):
                return form(value, inner)
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return encode(value.item(), 100)
    try:
        text = repr(value)[:300]
    except BaseException:
        text = f"<{kind.__name__}>"
    return ["object", text]


FORMS = [(int, lambda v, _: ["int", int.__format__(v, "x")]), (float, lambda v, _: ["float", float.__repr__(v)]),
         (str, lambda v, _: ["str", str.__getitem__(v, slice(None))]), (bytes, lambda v, _: ["bytes", bytes.hex(v)]),
         (complex, lambda v, inner: ["complex", inner([v.real, v.imag])]), (list, lambda v, inner: ["list", inner(list.__iter__(v))]),
         (tuple, lambda v, inner: ["tuple", inner(tuple.__iter__(v))]), (set, lambda v, inner: ["set", inner(set.__iter__(v))]),
         (frozenset, lambda v, inner: ["frozenset", inner(frozenset.__iter__(v))]),
         (dict, lambda v, inner: ["dict", [inner(pair) for pair in dict.items(v)]])]


def failure(error, home, code):
    """{"error": status, "text": the last frames with the program's own line numbers, then `Type: message`}."""
    name = type(error).__name__
    try:
        text = str(error).replace(home, ".") if home else str(error)
    except BaseException:
        text = ""
    lines, source, in_test, trace = [], code.splitlines(), "", error.__traceback__
    while trace:
        frame = trace.tb_frame.f_code
        if frame.co_filename == "<solution>" and 0 < trace.tb_lineno <= len(source):
            where = "" if frame.co_name == "<module>" else f", in {frame.co_name}"
            lines.append(f"  line {trace.tb_lineno}{where}: {source[trace.tb_lineno - 1].strip()[:200]}")
            in_test = False
        elif frame.co_filename == "<test>":
            in_test = True
        trace = trace.tb_next
    status = ("exit" if isinstance(error, SystemExit) else "memory" if isinstance(error, MemoryError) else
              "failed" if (isinstance(error, AssertionError) and in_test is not False) or name == "Failed" else "error")
    if status == "exit":
        return {"error": status, "text": "the program ended before the test did"}
    return {"error": status, "text": "\n".join(lines[-3:] + [f"{name}: {text[:500]}" if text else name])}


if __name__ == "__main__":
    worker(int(sys.argv[2]), sys.argv[3])
