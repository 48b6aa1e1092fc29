"""How fast trivial programs are judged: warm workers that fork, against the same harness in a fresh interpreter per program.

    python bench/executor.py [--jobs 400] [--rounds 5]

The ways take turns, round by round, and the median over rounds of the ratio within a round counts: noise of the machine hits all alike.
Last line: one JSON object with `speedup_vs_fresh_python` (one at a time against one worker), `scaling_2_workers` (their throughput
over that of 1 worker) and `programs_per_second` (workers: one per core).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import executor
from problems import Test

JOB = ("def f(x):\n    return x + 1\n", [Test("assert", "assert f(1) == 2"), Test("assert", "assert f(5) == 6")])
WORK = ("def f(x):\n    return sum(i * i for i in range(200_000)) and x + 1\n", JOB[1])  # some 25 ms of CPU
FRESH = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import sandbox
request = json.load(sys.stdin)
reading, writing = os.pipe()
os.write(writing, b"p" * 32 * len(request["tests"]))
sandbox.limit("AS", 2**30, 2**30)
sandbox.limit("CPU", 11, 11)
sandbox.run_program(request, {}, 1, reading)
"""


def fresh(code, tests):
    """The results of a job whose harness runs in an interpreter of its own."""
    def ask(request):
        run = subprocess.run([sys.executable, "-s", "-c", FRESH, str(Path(executor.__file__).parent)], input=json.dumps(request),
                             capture_output=True, text=True, check=True)
        return {"end": "exit 0", "cpu": 0, "idle": 0, "records": run.stdout, "proofs": ["p" * 32] * len(tests)}
    return executor.run_job(ask, code, tests, executor.Limits())


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def run(pool, job, count):
    assert all(verdict.reward == 1 for verdict in pool.run([job] * count))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400, help="programs per measurement with warm workers; a tenth with fresh interpreters")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    slow, speedup, scaling, rate = max(1, args.jobs // 10), [], [], []
    with executor.Executor(1) as one, executor.Executor(2) as two, executor.Executor() as all_cores:
        for pool in (one, two, all_cores):
            run(pool, JOB, 20)
        for number in range(args.rounds):
            per_fresh = seconds(lambda: [fresh(*JOB) for _ in range(slow)]) / slow
            per_warm = seconds(lambda: run(one, JOB, args.jobs)) / args.jobs
            scaling.append(seconds(lambda: run(one, WORK, slow)) / seconds(lambda: run(two, WORK, slow)))
            rate.append(args.jobs / seconds(lambda: run(all_cores, JOB, args.jobs)))
            speedup.append(per_fresh / per_warm)
            print(f"round {number + 1}: fresh {per_fresh * 1000:.1f} ms, warm {per_warm * 1000:.1f} ms a program; "
                  f"2 workers {scaling[-1]:.2f} x 1; {rate[-1]:.0f} programs/s")
    print(json.dumps({"speedup_vs_fresh_python": round(statistics.median(speedup), 2), "scaling_2_workers": round(statistics.median(scaling), 2),
                      "programs_per_second": round(statistics.median(rate), 1), "cores": len(os.sched_getaffinity(0)), "rounds": args.rounds}))


if __name__ == "__main__":
    main()
