"""Problems: what is asked of the model, what judges its programs, and the chat messages of a turn."""
from dataclasses import dataclass, field


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
    """A task. `prompt` is the whole text of the first user message."""
    task_id: str
    prompt: str
    tests: list[Test] = field(default_factory=list)
    starter_code: str = ""
    entry_point: str = ""
    source: str = ""
    difficulty: str = ""
