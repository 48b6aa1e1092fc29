"""report.py: a small hand-written run folder, what the page says of it, and the page in a real browser (if there is one)."""
import base64
import fcntl
import html
import json
import os
import re
import select
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

import report
from problems import BadInput

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TEMPLATE = (Path(report.__file__).parent / "report.html.jinja").read_text()
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--<script>document.title='owned'</script>{{ 7 * 19100119 }}\u2028'\"&"


# ---------------------------------------------------------------- a run folder by hand

def node(parent, turn, group, code, reward, credit, advantage, **more):
    passed = ["passed"] * int(2 * (reward or 0))
    return dict(parent=parent, turn=turn, group=group, text=f"Answer:\n```python\n{code}\n```\n", code=code, reward=reward, credit=credit,
                advantage=advantage, truncated=False, tokens=9, status=passed + ["failed"] * (2 - len(passed)),
                feedback=f"Passed {len(passed)} of 2 tests.") | more


def tree_at(step, task="task/7", code="def f(x):\n    return x"):
    nodes = [node(-1, 1, 0, code, 0.5, 1.0, 0.7071), node(-1, 1, 0, "def f(x):\n    return 0", 0.0, 0.0, None),
             node(-1, 1, 0, "", None, None, None, text="no idea", status=["infra", "infra"]),
             node(0, 2, 1, "def f(x):\n    return x + 1", 1.0, 1.0, 0.7071), node(0, 2, 1, "def f(x):\n    return x", 0.5, 0.5, -0.7071)]
    groups = [{"parent": -1, "truncated": False, "prompt": "<user>Write f.<assistant>"},
              {"parent": 0, "truncated": True, "prompt": "<user>Write f.<assistant>def f<user>Passed 1 of 2 tests.<assistant>"}]
    return {"step": step, "task_id": task, "prompt": "Write f.", "tests": ["assert f(1) == 2", "assert f(0) == 1"], "groups": groups, "nodes": nodes}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, steps=3, shift=0.0, trees=None, **settings):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "run": {"model": "tiny", "out": None}, "config": {"credit": "mars", "group_size": 3} | settings,
        "environment": {"commit": "abc123def456", "torch": "2.13.0", "machine": "Linux, 2 cores"}}))
    write_lines(folder / "metrics.jsonl", [{"step": s, "reward_turn1": 0.125 * s + shift, "solved_turn1": 0.5, "reward_turn2": None, "k3_mean": 0.0321,
                                            "grad_norm": float("nan") if s == 1 else 3.25 + s, "seconds_sampling": 4.5} for s in range(steps)])
    write_lines(folder / "eval.jsonl", [{"step": 0, "iter": [37.3, 40.7]}, {"step": steps, "iter": [62.04, 63.5]}])
    write_lines(folder / "trees.jsonl", [tree_at(s) for s in range(steps)] if trees is None else trees)
    return folder


def page_of(*folders):
    return report.page(report.load_runs(folders))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two run folders."""
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "first"), write_run(folder / "second", shift=0.5, credit="mers")


@pytest.fixture(scope="module")
def one(runs):
    """The page of the first; drawing its charts takes a second."""
    return page_of(runs[0])


@pytest.fixture(scope="module")
def both(runs):
    return page_of(*runs)


def index_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def unpack(tree):
    return json.loads(zlib.decompress(base64.b64decode(tree["data"])))


# ---------------------------------------------------------------- content

def test_header_table_and_numbers_are_those_of_the_run(one):
    rows = [re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", row)).strip() for row in re.findall("<tr.*?</tr>", one, re.S)]
    assert "first before 37.3 40.7" in rows and "after step 3 62.0 63.5" in rows
    assert "commit abc123def456" in rows and "torch 2.13.0" in rows and "machine Linux, 2 cores" in rows
    assert "credit mars" in rows and "group_size 3" in rows and "model tiny" in rows and "out -" in rows
    assert "Reward by turn turn 1 0 → 0.25" in rows and "KL to the initial model (k3) mean 0.0321 → 0.0321" in rows
    assert "Gradient norm before clipping 3.25 → 5.25" in rows and "Held-out pass@1, percent Iter-2 40.7 → 63.5" in rows
    assert not any(row.startswith("Entropy") or "turn 2" in row for row in rows)  # what is not there is not drawn as 0


def test_trees_are_on_the_page_as_they_were_logged_and_points_link_to_them(one):
    index = index_of(one)
    assert [(t["run"], t["step"], t["task"]) for t in index["trees"]] == [(0, 0, "task/7"), (0, 1, "task/7"), (0, 2, "task/7")]
    assert [unpack(t) for t in index["trees"]] == [tree_at(0), tree_at(1), tree_at(2)]
    links = re.findall(r'xlink:href="(#run=[^"]*)"', one)
    assert set(links) == {"#run=0&amp;step=0", "#run=0&amp;step=1", "#run=0&amp;step=2"}
    assert len(links) == 3 * 4 + 2 + 2  # four full curves, one without step 1, and step 0 of the two held-out curves


def test_overlaid_runs_have_a_legend_colours_and_marked_differences(both):
    assert "<h1>MURPHY: first, second</h1>" in both and index_of(both)["runs"] == ["first", "second"]
    assert {t["run"] for t in index_of(both)["trees"]} == {0, 1}
    reward = re.search(r"<figcaption>Reward by turn</figcaption>.*?</figure>", both, re.S)[0]
    assert "stroke: var(--run0)" in reward and "stroke: var(--run1)" in reward and "var(--run2)" not in reward
    alt = html.unescape(re.search(r'aria-label="([^"]*)"', reward)[1])
    assert alt == ("Chart over steps: Reward by turn. first, turn 1: 0 at step 0, 0.25 at step 2; second, turn 1: 0.5 at step 0, 0.75 at step 2.")
    assert re.search(r'<tr class="differs"><th scope="row">credit ≠</th><td>mars</td><td>mers</td></tr>', both)
    assert both.count('class="differs"') == 1


def test_every_chart_has_its_own_ids_alt_text_and_no_fixed_colour(one):
    svgs = re.findall("<svg.*?</svg>", one, re.S)
    assert len(svgs) == 6 and all('role="img" aria-label="Chart over steps: ' in svg for svg in svgs)
    ids = re.findall(r' id="([^"]*)"', one)
    assert len(ids) == len(set(ids))
    assert not re.findall(r"#[abc]0000\d|http[^ ]*matplotlib|#000000", "".join(svgs))


def test_smoothing_is_a_moving_average_without_the_pull_of_its_start():
    assert report.smooth([3.0] * 9) == pytest.approx([3.0] * 9) and report.smooth([1, 5]) == [1, 5]
    assert report.smooth([0, 1, 0, 0, 0, 0, 0, 0], 0.5)[:3] == pytest.approx([0, 1 / 1.5, 0.5 / 1.75])


def test_long_curves_are_averaged_in_bins():
    points = report.thin([(s, float(s)) for s in range(1000)], 300)
    assert len(points) == 250 and points[0] == (2, 1.5) and points[-1] == (998, 997.5)
    assert report.thin([(0, 1.0), (1, 2.0)]) == [(0, 1.0), (1, 2.0)]


# ---------------------------------------------------------------- hostile text, size, bad input

def test_hostile_text_is_escaped_everywhere(tmp_path):
    trees = [tree_at(0, task=HOSTILE, code=HOSTILE) | {"prompt": HOSTILE, "tests": [HOSTILE, HOSTILE]}]
    text = page_of(write_run(tmp_path / "<b onclick=1>&", trees=trees, model=HOSTILE, **{HOSTILE: 1}))
    assert "<img" not in text and "<b onclick" not in text and "133700833" not in text and 'onerror="' not in text
    assert "<!--" not in text and "\u2028" not in re.sub("<t[hd].*?</t[hd]>", "", text)
    assert text.count("</script>") == 2 and text.count("<script") == 2
    assert unpack(index_of(text)["trees"][0])["nodes"][0]["code"] == HOSTILE and index_of(text)["trees"][0]["task"] == HOSTILE
    assert "&lt;b onclick=1&gt;&amp;</h1>" in text and "&lt;/script&gt;&lt;img" in text


def test_only_the_pages_own_script_may_run_and_nothing_is_fetched(one):
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', one)[1]
    nonce = re.search(r'<script nonce="(\w{32})">', one)[1]
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', one) and "innerHTML" not in one and "url(http" not in one


def test_a_large_run_stays_under_5_mb_and_says_what_it_left_out(tmp_path, monkeypatch):
    noise = [tree_at(s, code=os.urandom(30_000).hex()) for s in range(12)]
    monkeypatch.setattr(report, "MAX_BYTES", 400_000)
    text = page_of(write_run(tmp_path / "first", steps=2000, trees=noise))
    kept = [t["step"] for t in index_of(text)["trees"]]
    assert len(text.encode()) < 400_000 and kept == [3, 7, 11]
    assert "holds 3 of 12 logged trees" in text


def test_trees_are_thinned_evenly_from_the_last_step():
    trees = [{"run": 0, "step": s, "task": "t", "data": "x" * 37} for s in range(10)]  # 100 characters each
    assert [t["step"] for t in report.thin_trees(trees, 1000)] == list(range(10))
    assert [t["step"] for t in report.thin_trees(trees, 999)] == [1, 3, 5, 7, 9]
    assert [t["step"] for t in report.thin_trees(trees, 100)] == [9] and report.thin_trees(trees, 99) == []


def test_a_run_folder_of_before_and_one_still_being_written_are_shown(tmp_path):
    folder = write_run(tmp_path / "first", trees=[])
    (folder / "config.json").write_text(json.dumps({"run": {"model": "tiny"}, "config": {}}))
    (folder / "eval.jsonl").unlink(), (folder / "trees.jsonl").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    text = page_of(folder)
    assert "not evaluated" in text and "The run folder does not say." in text and "This run logged no trees" in text


def refused(capsys, argv):
    assert report.main([str(a) for a in argv]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("report.py: ")
    return said[0]


def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch):
    good = write_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    assert "holds no metrics.jsonl" in refused(capsys, [tmp_path / "empty", "--out", tmp_path / "r.html"])
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert "no step yet" in refused(capsys, [good, tmp_path / "empty"])
    write_lines(tmp_path / "empty" / "metrics.jsonl", [{"step": 0}])
    assert "config.json" in refused(capsys, [tmp_path / "empty"])
    (good / "trees.jsonl").write_text('{"step": 0}\nnot JSON\n')
    assert "trees.jsonl, line 2" in refused(capsys, [good])
    assert "at most 8" in refused(capsys, [good] * 9)
    (good / "trees.jsonl").unlink()
    assert "cannot write" in refused(capsys, [good, "--out", tmp_path / "no" / "r.html"]) and not (tmp_path / "r.html").exists()
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert "pip install jinja2" in refused(capsys, [good])


def test_the_command_line_writes_the_page_and_says_its_size(tmp_path, capsys):
    assert report.main([str(write_run(tmp_path / "first")), "--out", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/r.html: 0.1 MB\n"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_runs_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    runs = report.load_runs([write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")])
    assert [run["name"] for run in runs] == [f"{tmp_path}/a/run", f"{tmp_path}/b/run"]
    with pytest.raises(BadInput, match="no metrics.jsonl"):
        report.load_run(tmp_path / "a")


# ---------------------------------------------------------------- contrast (WCAG 2.1 AA)

def luminance(colour):
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, two):
    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1])
def test_colours_have_the_contrast_of_wcag_aa_in_light_and_dark(mode):
    colours = {name: pair[mode] for name, *pair in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", TEMPLATE)}
    assert len(colours) == 20 and contrast("#ffffff", "#000000") == 21
    for back in ("bg", "panel"):
        assert all(contrast(colours[c], colours[back]) >= 4.5 for c in ("ink", "soft", "link"))
        assert all(contrast(colours[c], colours[back]) >= 3 for c in ["edge"] + [f"run{i}" for i in range(8)])
    assert all(contrast(colours["ink"], colours[c]) >= 4.5 for c in ("mark", "add", "del", "bad", "good"))


# ---------------------------------------------------------------- a real browser

def high_pipe():
    """A pipe whose descriptors are out of the way of 3 and 4."""
    low = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in low]
    os.close(low[0]), os.close(low[1])
    return high


class Browser:
    """Chromium without a window, spoken to through its debugging pipe (file descriptors 3 and 4). A context manager."""
    def __init__(self, folder):
        self.command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                        "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]

    def __enter__(self):
        (theirs_in, ours_out), (ours_in, theirs_out) = high_pipe(), high_pipe()
        self.process = subprocess.Popen(self.command, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        preexec_fn=lambda: (os.dup2(theirs_in, 3), os.dup2(theirs_out, 4)))
        os.close(theirs_in), os.close(theirs_out)
        self.out, self.read_from, self.buffer, self.count, self.session, self.complaints, self.loaded = ours_out, ours_in, b"", 0, None, [], 0
        page = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(domain + ".enable")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.out), os.close(self.read_from)

    def receive(self):
        while b"\0" not in self.buffer:
            assert select.select([self.read_from], [], [], 60)[0], "the browser said nothing for a minute"
            piece = os.read(self.read_from, 1 << 20)
            assert piece, "the browser ended"
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(message)
        self.loaded += message.get("method") == "Page.loadEventFired"
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(message["params"])
        return message

    def ask(self, method, **params):
        self.count += 1
        request = {"id": self.count, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.out, json.dumps(request).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.count:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def go(self, address):
        before = self.loaded
        self.ask("Page.navigate", url=address)
        while self.loaded == before:
            self.receive()

    def run(self, script):
        """The value of a script, awaited."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition):
        """Waits for a condition (script); the page may need to unpack a tree."""
        self.run(f"new Promise(done => {{ const look = () => {condition} ? done() : setTimeout(look, 20); look(); }})")

    def size(self, width, height, dark=False):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def screenshot(self, path, whole=False):
        png = base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **(
            {"clip": {"x": 0, "y": 0, "width": self.run("innerWidth"), "height": self.run("document.body.scrollHeight"), "scale": 1}} if whole else {}))["data"])
        Path(path).write_bytes(png)
        return png

    def key(self, name):
        for kind in ("rawKeyDown", "keyUp"):
            code = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[name]
            self.ask("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def click(self, selector):
        x, y = self.run(f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); "
                        f"return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def open_page(browser, folder, page, part=""):
    (folder / "report.html").write_text(page)
    browser.go("about:blank")
    browser.complaints.clear()
    browser.go(f"file://{folder}/report.html{part}")
    browser.until("document.querySelector('#tree .node')")


def text_of(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).innerText")


def test_in_a_browser_a_click_opens_a_program_and_arrows_walk_the_tree(browser, tmp_path, both):
    browser.size(1280, 900)
    open_page(browser, tmp_path, both)
    assert browser.run("[...document.querySelectorAll('.node')].map(b => b.children[0].textContent)") == [
        "0.50 → 1.00 → +0.71", "1.00 → 1.00 → +0.71", "0.50 → 0.50 → −0.71", "0.00 → 0.00 → –", "– → – → –"]
    assert browser.run("[...document.querySelectorAll('.node.pruned')].map(b => b.dataset.node)") == ["1"]
    assert browser.run("[...document.querySelectorAll('.node.none')].map(b => b.dataset.node)") == ["2"]
    assert text_of(browser, ".edge") == "Passed 1 of 2 tests."
    browser.click("[data-node='3']")
    browser.until("document.querySelector('#detail h3')")
    said = text_of(browser, "#detail")
    assert "Program 3, turn 2" in said and "reward 1.00 → credit 1.00 → advantage +0.71" in said and "Passed 2 of 2 tests." in said
    assert "(shortened to fit)" in said and "<user>Passed 1 of 2 tests.<assistant>" in said
    assert text_of(browser, "#detail mark") == "def f(x):\n    return x + 1"
    assert browser.run("[...document.querySelectorAll('.verdicts tr')].map(r => r.textContent)") == ["passedassert f(1) == 2", "passedassert f(0) == 1"]
    assert browser.run("[...document.querySelectorAll('.cards article pre')].map(p => [...p.children].map(l => l.textContent))") == [
        ["  def f(x):", "-     return x", "+     return x + 1"], ["  def f(x):", "      return x"]]
    for key, program in (("ArrowRight", 4), ("ArrowLeft", 3), ("ArrowUp", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowDown", 3)):
        browser.key(key)
        browser.until(f"document.activeElement.dataset.node === '{program}' && document.querySelector('#detail h3').textContent.startsWith('Program {program},')")
    assert browser.complaints == []


def test_in_a_browser_a_point_and_the_address_open_their_step(browser, tmp_path, both):
    browser.size(1280, 900)
    open_page(browser, tmp_path, both, part="#run=1&step=1&prompt=0&node=0")
    chosen = "['run', 'step', 'prompt'].map(id => document.getElementById(id).selectedOptions[0].text)"
    assert browser.run(chosen) == ["second", "1", "task/7"] and "Program 0," in text_of(browser, "#detail h3")
    browser.click("#charts figure:first-child .points a")
    browser.until(f"{chosen}[0] === 'first'")
    assert browser.run(chosen) == ["first", "0", "task/7"] and browser.run("document.querySelector('#detail').children.length") == 0
    browser.run("Object.assign(document.getElementById('step'), {value: '2'}).onchange({target: document.getElementById('step')})")
    assert browser.run(chosen)[1] == "2" and browser.complaints == []


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_the_page_is_as_wide_as_the_window(browser, tmp_path, one, width):
    browser.size(width, 800, dark=width == 390)
    open_page(browser, tmp_path, one, part="#run=0&step=2&prompt=0&node=3")
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("getComputedStyle(document.body).backgroundColor") == ("rgb(255, 255, 255)" if width == 1280 else "rgb(20, 23, 28)")
    png = browser.screenshot(tmp_path / "page.png")
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) == width and len(png) > 10_000
    too_small = browser.run("[...document.querySelectorAll('button, select')].filter(b => Math.min(b.offsetWidth, b.offsetHeight) < 24).length")
    assert too_small == 0 and browser.complaints == []


def test_in_a_browser_hostile_text_is_only_text(browser, tmp_path):
    trees = [tree_at(0, task=HOSTILE, code=HOSTILE) | {"prompt": HOSTILE, "tests": [HOSTILE, HOSTILE]}]
    open_page(browser, tmp_path, page_of(write_run(tmp_path / "first", trees=trees, model=HOSTILE)), part="#run=0&step=0&prompt=0&node=0")
    browser.until("document.querySelector('#detail mark')")
    assert text_of(browser, "#task") == HOSTILE and browser.run("document.querySelector('#detail mark').textContent") == HOSTILE
    assert browser.run("document.title") == "MURPHY: first" and browser.run("document.images.length") == 0 and browser.complaints == []
