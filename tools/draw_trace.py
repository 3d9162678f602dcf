#!/usr/bin/env python3
"""A step of a trace as a picture: draw_trace.py TRACE.json OUT.svg [--step N] [--ranks 0,1]

Below each other, for every rank: its sections; the parts of the model; its collectives, coloured by
their axes, of which the part in which the rank waited for the slowest one is pale; and the kernels
of each stream, where there are some. Where a rank has two micro-batches under way, each has rows of
its own, with the turns of the other one left out, and a row of what is on its way: collectives over
ep from their call to their end. Perfetto shows the same and all the rest; this is for a page, or
for a machine without a browser.
"""

import argparse
import html
import json

WIDTH, LEFT, ROW, GAP = 1160, 170, 15, 9  # pixels
LEAST = 0.4  # narrower slices are not drawn
SECTIONS = {"data": "#8d6e63", "forward": "#64b5f6", "backward": "#1e88e5", "reduce": "#26a69a",
            "update": "#7e57c2", "waiting": "#eeeeee", "saving": "#bdbdbd", "validation": "#ffd54f"}
PARTS = {"embedding": "#c5e1a5", "attention": "#ffb74d", "mlp": "#aed581", "moe": "#e57373",
         "head": "#ba68c8"}
OPERATORS = "#90a4ae"
KERNELS = {"kernel": "#455a64", "slow link": "#ffcc80"}
LINK_KERNEL = "sleep_on_link"  # moesh/comm/paced.h
AXES = ["#ef6c00", "#2e7d32", "#5e35b1", "#c62828", "#00838f", "#6d4c41", "#ad1457", "#558b2f"]


class Picture:
    def __init__(self, begin, end):
        self.begin, self.scale = begin, (WIDTH - LEFT - 10) / (end - begin)
        self.end, self.y, self.lines = end, 0, []

    def x(self, time):
        return LEFT + (min(max(time, self.begin), self.end) - self.begin) * self.scale

    def text(self, x, y, text, size=11, more=""):
        self.lines.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" {more}>'
                          f'{html.escape(text)}</text>')

    def bar(self, begin, end, colour, height=ROW, label=""):
        x, width = self.x(begin), self.x(end) - self.x(begin)
        if width < LEAST:
            return
        self.lines.append(f'<rect x="{x:.1f}" y="{self.y + (ROW - height) / 2:g}" '
                          f'width="{width:.1f}" height="{height:g}" fill="{colour}"/>')
        if label and width > 6.2 * len(label) + 4:
            self.text(x + 3, self.y + 11, label, 10)

    def row(self, name):
        self.text(LEFT - 8, self.y + 11, name, 11, 'text-anchor="end" fill="#555"')

    def legend(self, name, colours):
        self.row(name)
        x = LEFT
        for label, colour in colours.items():
            self.lines.append(f'<rect x="{x}" y="{self.y + 3}" width="10" height="10" '
                              f'fill="{colour}" stroke="#999" stroke-width="0.5"/>')
            self.text(x + 14, self.y + 12, label)
            x += 26 + 7 * len(label)
        self.y += ROW + 2

    def svg(self):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.y:g}" '
                f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n'
                + "\n".join(self.lines) + "\n</svg>\n")


def outermost(events):
    end = 0
    for e in events:
        if e["ts"] >= end:
            end = e["ts"] + e["dur"]
            yield e


def draw_lane(picture, events, axes, name, others_turns):
    picture.row(name("model"))
    for e in outermost(events.get("operator", []) if others_turns else []):  # of backward, too
        picture.bar(e["ts"], e["ts"] + e["dur"], OPERATORS, ROW - 6)
    for e in events.get("scope", []):
        if e["name"] in PARTS:
            picture.bar(e["ts"], e["ts"] + e["dur"], PARTS[e["name"]], label=e["name"])
    for begin, end in others_turns:
        picture.bar(begin, end, "white")
    picture.y += ROW + 1
    picture.row(name("collectives"))
    for e in events.get("collective", []):
        colour = axes[e["args"]["axes"]]
        picture.bar(e["ts"], e["ts"] + e["dur"], colour, label=e["name"])
        waited = min(e["args"].get("waited_us", 0), e["dur"])
        picture.bar(e["ts"], e["ts"] + waited, "#ffffffb0")
    picture.y += ROW + 1
    if others_turns:
        picture.row(name("on the way"))
        for begin, end, axis in events.get("in progress", []):
            if axis.startswith("ep"):
                picture.bar(begin, end, axes[axis], ROW - 6)
        picture.y += ROW + 1


def draw_rank(picture, rank, events, axes):
    """`events` are those of the rank, by track: of the host by category, and of the device."""
    picture.text(10, picture.y + 11, f"rank {rank}", 12, 'font-weight="bold"')
    picture.row("sections")
    for e in events.get("host", {}).get("section", []):
        inner = e["name"] in ("reduce", "waiting")
        picture.bar(e["ts"], e["ts"] + e["dur"], SECTIONS.get(e["name"], "#ccc"),
                    ROW - 6 if inner else ROW)
    picture.y += ROW + 1
    lanes = sorted(track for track in events if track.startswith("host"))
    for lane, track in enumerate(lanes):
        turns = [(e["ts"], e["ts"] + e["dur"]) for e in events[track].get("turn", [])]
        draw_lane(picture, events[track], axes,
                  lambda name: f"{lane}: {name}" if len(lanes) > 1 else name, turns)
    for track, categories in sorted(events.items()):
        if track.startswith("GPU "):
            picture.row(track)
            for e in categories["kernel"]:
                kind = "slow link" if LINK_KERNEL in e["name"] else "kernel"
                picture.bar(e["ts"], e["ts"] + e["dur"], KERNELS[kind])
            picture.y += ROW + 1
    picture.y += GAP


def by_rank(trace, step):
    """{rank: {track: {category: events}}}, of what touches the step of the rank; and the step."""
    everything = trace["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in everything
               if e["ph"] == "M" and e["name"] == "thread_name"}
    steps = [e for e in everything if e.get("cat") == "step" and step in (None, e["name"])]
    if not steps:
        names = sorted({e["name"] for e in everything if e.get("cat") == "step"})
        raise SystemExit(f"draw_trace.py: the trace has no {step}; it has {', '.join(names)}")
    first = steps[0]["name"]
    span = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in steps if e["name"] == first}
    ranks = {rank: {} for rank in span}
    begun = {}  # by id, of what is in progress
    for e in everything:
        if e["ph"] not in "Xbe" or e["pid"] not in span:
            continue
        events = ranks[e["pid"]].setdefault(tracks[e["pid"], e["tid"]], {})
        begin, end = span[e["pid"]]
        if e["ph"] == "b":
            begun[e["id"]] = e
        elif e["ph"] == "e":
            b = begun[e["id"]]
            if b["ts"] < end and e["ts"] > begin:
                events.setdefault("in progress", []).append((b["ts"], e["ts"], b["args"]["axes"]))
        elif e["ts"] < end and e["ts"] + e["dur"] > begin:
            events.setdefault(e["cat"], []).append(e)
    return ranks, first, min(b for b, _ in span.values()), max(e for _, e in span.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("out")
    parser.add_argument("--step", type=int, help="default: the first of the trace")
    parser.add_argument("--ranks", help="such as 0,1; default: all")
    args = parser.parse_args()
    with open(args.trace) as file:
        trace = json.load(file)
    ranks, step, begin, end = by_rank(trace, args.step and f"step {args.step}")
    if args.ranks:
        ranks = {int(r): ranks[int(r)] for r in args.ranks.split(",")}
    names = sorted({e["args"]["axes"] for r in ranks.values() for track in r.values()
                    for e in track.get("collective", [])})
    axes = {name: AXES[i % len(AXES)] for i, name in enumerate(names)}
    picture = Picture(begin, end)
    picture.y = 8
    about = trace["otherData"]
    picture.text(10, picture.y + 12, f"{step}: {(end - begin) / 1e3:.1f} ms, "
                 f"{about.get('model', '')} on {about.get('mesh', '')}", 13, 'font-weight="bold"')
    picture.y += 24
    for rank, events in sorted(ranks.items()):
        draw_rank(picture, rank, events, axes)
    picture.legend("sections", SECTIONS)
    has_lanes = any("turn" in track for r in ranks.values() for track in r.values())
    picture.legend("model", {**PARTS, "operators": OPERATORS} if has_lanes else PARTS)
    picture.legend("collectives on", {**axes, "pale: waits for the slowest": "#eecbb0"})
    if any(track.startswith("GPU ") for r in ranks.values() for track in r):
        picture.legend("device", KERNELS)
    picture.y += 6
    with open(args.out, "w") as file:
        file.write(picture.svg())


if __name__ == "__main__":
    main()
