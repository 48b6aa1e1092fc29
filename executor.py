"""Runs programs against tests in limited processes, and says what failed.

    with Executor() as executor:                              # one worker per core
        verdict, = executor.run([(code, problem.tests)])      # code: str; tests: list[problems.Test]
    verdict.reward, verdict.status, verdict.feedback()

A worker is an interpreter started once (by exec: nothing of CUDA or of the trainer's memory is inherited); it forks a child
per job. The caller's process is the judge. Of an assert like `f(3) == 7` the child gets only `f(3)`, and sends back plain
data; 7 and the comparison stay with the judge, so there is nothing in the program's process to find, patch or forge.
judge.py takes tests apart and decides on what comes back; sandbox.py is the worker and the child.

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
import os
import queue
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import sandbox
from judge import MIB, Result, fit, how_it_ended, make_plan, results_of
from sandbox import receive, send


@dataclass(frozen=True)
class Limits:
    """What one job (a program with all its tests) may use."""
    cpu_seconds: float = 10      # of CPU
    wall_seconds: float = 20     # and 3 more for each second of CPU used, so that a crowded machine changes no verdict
    memory: int = 1024 * MIB     # bytes of address space, per process
    output: int = 16 * MIB       # bytes written to stdout and stderr, per test
    files: int = 64 * MIB        # bytes in the working folder
    open_files: int = 256
    processes: int = 64          # with threads; without namespaces see sandbox.become_child


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
                [sys.executable, "-s", "-B", "-X", "utf8", os.path.abspath(sandbox.__file__), str(theirs.fileno()), self.mode],
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
