"""The table of servers in turns: medians of the readings at equal host speed, and ratios to ETAP."""

from __future__ import annotations

import statistics

from bench.common.tables import provenance_line, table

HOST_TOLERANCE = 0.10
ALONE = ("shared", "engine_top_k")  # words of Variant that other backends lack
TITLES = ["requests x input/output, prefill", "backend", "/ ETAP", "tokens/s per GPU", "host ms", "readings"]


def at_equal_host_speed(rows: list[dict]) -> list[dict]:
    """The readings of one point within HOST_TOLERANCE of each other's host speed: of most backends, then most
    readings, then the fastest host."""

    def within(low: float) -> list[dict]:
        return [row for row in rows if low <= row["host_ms"] <= low * (1 + HOST_TOLERANCE)]

    lows = sorted({row["host_ms"] for row in rows})
    return max(map(within, lows), key=lambda span: (len({row["backend"] for row in span}), len(span)), default=[])


def cells(document: dict) -> list[list[str]]:
    """Titles, and a line per point and backend."""
    rows = document["rows"]
    key = "itl_ms" if all(row.get("itl_ms") for row in rows) else "tpot_ms"
    key = "ttft_ms" if all("/2," in row["point"] for row in rows) else key  # two tokens of output: prefills
    lines = [[*TITLES[:2], f"{key[:-3].upper()} ms", *TITLES[2:]]]
    for point in dict.fromkeys(row["point"] for row in rows):
        of_point = [row for row in rows if row["point"] == point]
        valid: dict[str, list[dict]] = {}
        for row in at_equal_host_speed(of_point):
            valid.setdefault(row["backend"], []).append(row)
        times = {name: [row[key] for row in readings] for name, readings in valid.items()}
        for name in dict.fromkeys(row["backend"] for row in of_point):
            hosts = [row["host_ms"] for row in of_point if row["backend"] == name]
            line, own, reference = ["void", "-", "-"], times.get(name), times.get(_etap_like(name, times))
            if own:
                line[0] = f"{statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f})"
                rate = statistics.median(row["tokens_per_second"] for row in valid[name]) / document["gpus"]
                line[2] = f"{rate:,.1f}"
            if own and reference:
                line[1] = f"{statistics.median(own) / statistics.median(reference):.3f}"
            void = len(hosts) - len(own or [])
            used = f"{len(own or [])}, {void} void" if void else str(len(hosts))
            lines.append([point, name, *line, f"{min(hosts):.1f} to {max(hosts):.1f}", used])
    return lines


def _etap_like(name: str, names: dict) -> str | None:
    """ETAP's backend with the same cache, among these names, as it is without what it may do besides."""
    words = "+".join(word for word in name.split("+")[1:] if word not in ALONE)
    return next((one for one in names if one.lower().partition("+")[0::2] == ("etap", words)), None)


def text(name: str, document: dict) -> str:
    """The table, what is missing, and how it was made."""
    model = f"{document['model']}, {document['weights']}; {document['gpus']} GPUs"
    failed = [f"failed: {one}" for one in document.get("failures", [])]
    stopped = [f"stopped {document['stopped']}"] if document.get("stopped") else []
    stopped += ["not complete: the command asks for more"] if document.get("complete") is False else []
    lines = [model, document["note"], *document.get("skipped", []), *failed, *stopped, provenance_line(document)]
    listed = "\n".join(f"- {line}" for line in filter(None, lines))
    title = f"{name}: {document['scenario']}, {document['engine']}, {document['gpu']}"
    return "\n\n".join([f"### {title}", *([table(cells(document))] if document["rows"] else []), listed])
