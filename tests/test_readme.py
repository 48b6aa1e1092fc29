"""README: every link into the code points at what it names."""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_links_point_at_the_lines_that_define_what_they_name():
    links = re.findall(r"\[`([\w.]+)`\]\((\w+\.py)#L(\d+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 15
    wrong = []
    for name, file, line in links:
        lines = (ROOT / file).read_text().splitlines()
        pattern = rf"\s*(def|class) {re.escape(name)}\b"
        if int(line) > len(lines) or not re.match(pattern, lines[int(line) - 1]):
            right = [i for i, text in enumerate(lines, 1) if re.match(pattern, text)]
            wrong.append(f"{name}: {file}#L{line}, should be #L{right[0] if right else '?'}")
    assert not wrong


def test_files_named_in_tables_exist():
    for target in re.findall(r"\]\(([\w/.]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
