"""One self-contained page on one or more run folders of train.py: settings, curves, and the rollout trees to click through.

    python report.py runs/NAME [runs/OTHER ...] [--out report.html]

The page needs no network and stays under 5 MB: curves of long runs are thinned, and of the logged trees those of every k-th
step are taken, k as small as fits. Programs, prompts and settings are hostile text. They reach the page escaped by jinja2, or as
compressed data that its script shows as text, never as HTML; and the page's policy forbids every script but its own.

Left out: a live view (run it again), more than 8 runs, browsers older than 2024.
"""
import argparse
import base64
import hashlib
import html
import importlib.util
import io
import json
import math
import re
import sys
import zlib
from pathlib import Path

from problems import BadInput

MAX_BYTES = 4_900_000
MAX_POINTS = 300   # of one curve; a longer one is averaged in as many bins
MAX_LINKS = 60     # points of one curve that link to trees
MAX_RUNS = 8       # colours that can be told apart, --run0 ... --run7 of the template

CHARTS = [  # title, {metric: label}, limits of the y axis or None; * is each turn or iteration that the run has
    ("Reward by turn", {"reward_turn*": "turn *"}, (0, 1)),
    ("Solved share by turn", {"solved_turn*": "turn *"}, (0, 1)),
    ("Held-out pass@1, percent", {"held_out_iter*": "Iter-*"}, None),
    ("Credit in a group", {"group_std": "mean std", "flat_groups": "share of flat groups"}, None),
    ("KL to the initial model (k3)", {"k3_mean": "mean"}, None),
    ("Entropy, nats per token", {"entropy": "mean"}, None),
    ("Gradient norm", {"grad_norm": "before clipping"}, None),
    ("Response length, tokens", {"length_mean": "mean", "length_max": "longest"}, None),
    ("Truncated responses, share", {"truncated_share": "share"}, (0, 1)),
    ("Pruned nodes, share", {"pruned_share": "share"}, (0, 1)),
    ("Seconds per step", {"seconds_sampling": "sampling", "seconds_execution": "waiting for programs",
                          "seconds_optimisation": "optimisation"}, None),
    ("Sampled tokens per second", {"tokens_per_second": "tokens/s"}, None),
]


# ---------------------------------------------------------------- reading

def read_lines(path):
    """Records of a .jsonl file, [] if there is none; a last line still being written is left out."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            records.append(json.loads(line))
            records[-1]["step"]
        except (ValueError, TypeError, KeyError):
            raise BadInput(f"{path}, line {number}: not a record of train.py (JSON with a step)") from None
    return records


def load_run(folder):
    """A run folder as a dict: name, settings, environment, metrics and scores (rows by step), trees (records)."""
    if not (folder / "metrics.jsonl").exists():
        raise BadInput(f"{folder} holds no metrics.jsonl; give the run folder that train.py made")
    metrics = read_lines(folder / "metrics.jsonl")
    if not metrics:
        raise BadInput(f"{folder}/metrics.jsonl holds no step yet; wait for the first one")
    try:
        config = json.loads((folder / "config.json").read_text())
        settings, environment = config["run"] | config["config"], config.get("environment", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder} holds no config.json of train.py ({error})") from None
    scores = read_lines(folder / "eval.jsonl")
    rows = [{"step": s["step"]} | {f"held_out_iter{k + 1}": v for k, v in enumerate(s["iter"])} for s in scores]
    return {"name": folder.resolve().name, "settings": settings, "environment": environment, "metrics": metrics + rows,
            "scores": scores, "trees": read_lines(folder / "trees.jsonl")}


def load_runs(folders):
    if len(folders) > MAX_RUNS:
        raise BadInput(f"{len(folders)} runs are too many to tell apart on one page; give at most {MAX_RUNS}")
    runs = [load_run(Path(folder)) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        for run, folder in zip(runs, folders):
            run["name"] = str(folder)
    return runs


# ---------------------------------------------------------------- curves

def series(run, metric):
    """The points [(step, value)] of a metric; a step where it is not there, or not finite, has none."""
    points = [(row["step"], row[metric]) for row in run["metrics"] if row.get(metric) is not None]
    return [(step, float(value)) for step, value in points if math.isfinite(value)]


def lines_of(run, metrics):
    """{label: points} of the metrics of a chart, `*` replaced by 1, 2, ... as far as the run has points."""
    lines = {}
    for metric, label in metrics.items():
        for n in range(1, 100) if "*" in metric else [0]:
            points = series(run, metric.replace("*", str(n)))
            if not points:
                break
            lines[label.replace("*", str(n))] = points
    return lines


def thin(points, most=MAX_POINTS):
    """Means of equal bins, so that at most `most` points are left."""
    size = math.ceil(len(points) / most)
    bins = [points[i:i + size] for i in range(0, len(points), size)] if size > 1 else [[p] for p in points]
    return [(b[len(b) // 2][0], sum(v for _, v in b) / len(b)) for b in bins]


def smooth(values, factor=0.6):
    """Exponential moving average without the pull of its start; fewer than 8 values are left as they are."""
    if len(values) < 8:
        return list(values)
    total, weight, smoothed = 0.0, 0.0, []
    for value in values:
        total, weight = factor * total + value, factor * weight + 1
        smoothed.append(total / weight)
    return smoothed


def draw_chart(runs, number):
    """Title and inline SVG (colours of the page's stylesheet) of one chart; None if no run has a point."""
    title, metrics, limits = CHARTS[number]
    drawn = [lines_of(run, metrics) for run in runs]
    labels = list(dict.fromkeys(label for lines in drawn for label in lines))
    if not labels:
        return None
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    figure = Figure(figsize=(4.4, 2.9), layout="constrained")
    axes = figure.add_subplot()
    styles = dict(zip(labels, ["-", "--", ":", "-."] * len(labels)))
    for r, lines in enumerate(drawn):
        linked = {t["step"] for t in runs[r]["trees"]}
        for label, points in lines.items():
            steps, values = zip(*thin(points))
            look = dict(color=f"#a0000{r}", linestyle=styles[label], linewidth=1.4)
            axes.plot(steps, values, gid="raw", **look)
            axes.plot(steps, smooth(values), gid="smooth", **look)
            dots = [p for p in points if p[0] in linked]
            dots = dots[::math.ceil(len(dots) / MAX_LINKS) or 1]
            axes.scatter([p[0] for p in dots], [p[1] for p in dots], s=9, color=look["color"], gid="points", zorder=3
                         ).set_urls([f"#run={r}&step={step}" for step, _ in dots])
    axes.set(xlabel="step", ylim=limits and (-0.03, 1.03))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="#b00000", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        figure.legend(handles=[Line2D([], [], color="#c00000", linestyle=styles[label], label=label) for label in labels],
                      loc="outside upper left", ncols=3, frameon=False, borderpad=0, handlelength=2.4)
    return {"title": title, "svg": svg_of(figure, number, alt_text(title, runs, drawn))}


def svg_of(figure, number, alt):
    """The figure as SVG text for a page, described by alt: its placeholders become CSS colours, its gids classes, other ids go."""
    import matplotlib
    look = {"svg.fonttype": "none", "svg.hashsalt": str(number), "font.size": 10, "text.color": "#c00000"}
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
        axes.tick_params(colors="#c00000")
        axes.xaxis.label.set_color("#c00000")
        for spine in axes.spines.values():
            spine.set_color("#b00000")
    for text in [text for legend in figure.legends for text in legend.get_texts()]:
        text.set_color("#c00000")
    with matplotlib.rc_context(look):
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()[file.getvalue().index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="(raw|smooth|points)"', r'<g class="\1"', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("<a ", '<a tabindex="-1" ')
    view = re.search(r'viewBox="[^"]*"', svg)[0]
    svg = re.sub("<svg[^>]*>", lambda _: f'<svg {view} role="img" aria-label="{html.escape(alt)}">', svg, count=1)
    svg = re.sub(r"#a0000(\d)", r"var(--run\1)", svg)
    return svg.replace("#b00000", "var(--line)").replace("#c00000", "currentColor")


def alt_text(title, runs, drawn):
    """A chart in words: first and last value of every curve."""
    said = [f"{run['name']}, {label}: {number(points[0][1])} at step {points[0][0]}, {number(points[-1][1])} at step {points[-1][0]}"
            for run, lines in zip(runs, drawn) for label, points in lines.items()]
    return f"Chart over steps: {title}. " + "; ".join(said) + "."


def number(value):
    return "-" if value is None else f"{value:.4g}"


# ---------------------------------------------------------------- tables and trees

def table_of(runs, part):
    """Rows (name, [one str per run], whether runs differ) of "settings" or "environment"."""
    names = list(dict.fromkeys(name for run in runs for name in run[part]))
    rows = [(name, ["-" if run[part].get(name) is None else str(run[part][name]) for run in runs]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def first_and_last(runs):
    """Rows (chart, curve, [one str per run]): what the charts show, as numbers."""
    rows = []
    for title, metrics, _ in CHARTS:
        drawn = [lines_of(run, metrics) for run in runs]
        for label in dict.fromkeys(label for lines in drawn for label in lines):
            ends = [lines[label] if label in lines else [(0, None)] for lines in drawn]
            rows.append((title, label, [f"{number(p[0][1])} → {number(p[-1][1])}" for p in ends]))
    return rows


def packed_trees(runs):
    """Every logged tree: what the pickers need, and the record, compressed. (Siblings repeat each other, so a tenth is left.)"""
    return [{"run": r, "step": tree["step"], "task": tree["task_id"],
             "data": base64.b64encode(zlib.compress(json.dumps(tree).encode(), 9)).decode()} for r, run in enumerate(runs) for tree in run["trees"]]


def thin_trees(trees, room):
    """The trees of every k-th step, counted from the last, k as small as fits `room` characters; [] if none fits."""
    steps = sorted({tree["step"] for tree in trees}, reverse=True)
    for k in range(1, len(steps) + 1):
        kept = set(steps[::k])
        chosen = [tree for tree in trees if tree["step"] in kept]
        if sum(len(tree["data"]) + len(json.dumps(tree["task"])) + 60 for tree in chosen) <= room:
            return chosen
    return []


# ---------------------------------------------------------------- page

def page(runs):
    """The HTML of a list of runs (of load_run), str."""
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"the page needs {package}, which is not installed: pip install {package}")
    import jinja2
    loader = jinja2.FileSystemLoader(Path(__file__).resolve().parent)
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("report.html.jinja")
    charts = [chart for chart in (draw_chart(runs, i) for i in range(len(CHARTS))) if chart]
    trees = packed_trees(runs)
    fill = dict(runs=runs, charts=charts, settings=table_of(runs, "settings"), environment=table_of(runs, "environment"),
                numbers=first_and_last(runs), iterations=max([len(s["iter"]) for run in runs for s in run["scores"]], default=0),
                nonce=hashlib.sha256(json.dumps([run["metrics"] for run in runs]).encode()).hexdigest()[:32])  # unknown when text was sampled

    def render(kept):
        return template.render(fill, logged=len(trees), kept=len(kept), data={"runs": [run["name"] for run in runs], "trees": kept})
    return render(thin_trees(trees, MAX_BYTES - len(render([]).encode("utf-8", "replace"))))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder of train.py; several are drawn over each other")
    parser.add_argument("--out", default="report.html", help="the page (default report.html)")
    args = parser.parse_args(argv)
    try:
        text = page(load_runs(args.runs))
        try:
            Path(args.out).write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            raise BadInput(f"cannot write {args.out}: {error.strerror}") from None
    except BadInput as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {len(text.encode('utf-8', 'replace')) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
