"""The life of a replica as a picture, drawn from its table: states in the order of a life, an arrow for every legal event.

Only where a state stands is decided here; what leads to what is read off the table, so a row that is added is drawn, or the
drawing fails because it has no place for a new state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from html import escape

from policies.replica import COMING, RUNNING, TERMINAL, TRANSITIONS, State

_WIDTH, _HEIGHT = 116, 40
_PLACES: Mapping[State, tuple[int, int]] = {
    State.QUEUED: (90, 150),
    State.MATCHING: (270, 150),
    State.RESTORING: (470, 90),
    State.STARTING: (470, 210),
    State.VERIFYING: (670, 150),
    State.ADMITTED: (850, 150),
    State.DRAINING: (1010, 150),
    State.STOPPED: (1010, 300),
    State.CANCELLED: (270, 320),
    State.FAILED: (560, 340),
    State.QUARANTINED: (770, 300),
}
_STYLE = """
 .box{fill:#fff;stroke:#455a64;stroke-width:1.5}.coming{fill:#e3f2fd}.running{fill:#e8f5e9}.ended{fill:#eceff1}
 text{font:13px sans-serif;fill:#1c2529;text-anchor:middle}.event{font-size:11px;fill:#37474f}
 path{fill:none;stroke:#78909c;stroke-width:1.3;marker-end:url(#arrow)}.lost{stroke-dasharray:4 3}
"""


def picture() -> str:
    """An SVG."""
    arrows: defaultdict[tuple[State, State], list[str]] = defaultdict(list)
    for (state, event), after in TRANSITIONS.items():
        arrows[state, after].append(str(event).replace("_", " "))
    drawn = [_arrow(state, after, events) for (state, after), events in arrows.items()]
    boxes = [_box(state) for state in State]
    return "\n".join(
        (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1090 400" role="img" aria-labelledby="title">',
            '<title id="title">The life of a replica</title>',
            f"<style>{_STYLE}</style>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
            '<path d="M0 0 8 4 0 8z" style="fill:#78909c;stroke:none;marker-end:none"/></marker></defs>',
            '<rect width="1090" height="400" fill="#fff" rx="6"/>',
            *drawn,
            *boxes,
            "</svg>\n",
        )
    )


def _box(state: State) -> str:
    x, y = _PLACES[state]
    kind = "coming" if state in COMING else "running" if state in RUNNING else "ended" if state in TERMINAL else ""
    place = f'x="{x - _WIDTH // 2}" y="{y - _HEIGHT // 2}" width="{_WIDTH}" height="{_HEIGHT}"'
    return f'<rect class="box {kind}" {place} rx="8"/><text x="{x}" y="{y + 4}">{escape(state)}</text>'


def _edge(place: tuple[int, int], toward: tuple[float, float]) -> tuple[float, float]:
    """Where the line from the middle of a box leaves it."""
    dx, dy = toward[0] - place[0], toward[1] - place[1]
    scale = min(_WIDTH / 2 / abs(dx) if dx else 9e9, _HEIGHT / 2 / abs(dy) if dy else 9e9)
    return place[0] + dx * scale, place[1] + dy * scale


def _arrow(state: State, after: State, events: list[str]) -> str:
    start, end = _PLACES[state], _PLACES[after]
    back = end[0] < start[0] and after is State.QUEUED
    # What goes back to the queue arches over everything else; the rest is bent a little, so that two never lie on each other.
    bend = -0.34 * (start[0] - end[0]) if back else 0.08 * (end[0] - start[0])
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + bend)
    (x1, y1), (x2, y2) = _edge(start, middle), _edge(end, middle)
    label = (0.25 * x1 + 0.5 * middle[0] + 0.25 * x2, 0.25 * y1 + 0.5 * middle[1] + 0.25 * y2 - 4)
    line = f'<path class="{"lost" if back else ""}" d="M{x1:.0f} {y1:.0f} Q{middle[0]:.0f} {middle[1]:.0f} {x2:.0f} {y2:.0f}"/>'
    return f'{line}<text class="event" x="{label[0]:.0f}" y="{label[1]:.0f}">{escape(", ".join(events))}</text>'
