"""The dashboards about hosts: restores, snapshots and their storage, GPUs."""

from __future__ import annotations

from typing import Any

from grafana.boards import MODELS
from grafana.panels import HOST, MODEL, Ask, Panel, Row, board, mean, most, of, once, or_zero, rate, total

_HOSTS = ("host", "label_values(rewake_host_up, host)")
_BOTH = (MODEL, HOST)


def restore() -> Any:
    """Where the time of a start goes."""
    buckets = total(once(of("start_seconds_bucket", *_BOTH)), "le, model, start")
    anatomy = Row(
        "Anatomy",
        (
            Panel(
                "Stages against the cold start",
                "What each stage takes on average, one behind the other: restored, resumed, cold.",
                (Ask(mean("cold_start_seconds", "start, stage", *_BOTH)),),
                "waterfall",
                "s",
                width=16,
            ),
            Panel(
                "Whole starts",
                "From claim to admission, on average.",
                (Ask(mean("start_seconds", "model, start", *_BOTH), "{{model}} {{start}}"),),
                "bars",
                "s",
            ),
            Panel(
                "Starts, p95",
                "Of all since the installation began.",
                (Ask(f"histogram_quantile(0.95, {buckets})", "{{model}} {{start}}"),),
                unit="s",
            ),
            Panel(
                "Against the floor",
                "The last restore's time by the least that its bytes need on this host; 1: none is lost.",
                (Ask(once(of("restore_floor_ratio", *_BOTH)), "{{model}} on {{host}}"),),
            ),
            Panel(
                "Lost",
                "What each stage of the last restore took beyond its floor.",
                (Ask(most(of("restore_lost_seconds", *_BOTH), "model, stage"), "{{model}} {{stage}}"),),
                "bars",
                "s",
            ),
            Panel(
                "Bytes by tier",
                "Where starts read what they moved: memory, page cache, disk, network.",
                (Ask(total(once(rate("restore_bytes_total", *_BOTH)), "tier"), "{{tier}}"),),
                "areas",
                "Bps",
            ),
        ),
    )
    said = "Where the time of a start goes, and what goes wrong."
    return board("restore", "Restore anatomy", said, (anatomy, _results()), (MODELS, _HOSTS))


def _results() -> Row:
    return Row(
        "Results",
        (
            Panel(
                "Starts",
                "All of them, by result and kind.",
                (Ask(total(once(of("restores_total", *_BOTH)), "result, start"), "{{result}} {{start}}"),),
                "bars",
            ),
            Panel(
                "Why not",
                "Starts that did not end well, by what was wrong: canary, snapshot, host, tool, transient, environment.",
                (Ask(or_zero(total(once(rate("restores_total", *_BOTH, 'reason!=""')), "reason")), "{{reason}}"),),
                unit="ops",
            ),
            Panel(
                "Canaries",
                "Whether restored engines repeated their donor's answers.",
                (Ask(total(once(of("canary_total", *_BOTH)), "result"), "{{result}}"),),
                "bars",
            ),
            Panel(
                "Work",
                "Jobs in work, and for how many seconds the oldest has been.",
                (
                    Ask(once(of("leases", HOST)), "{{host}} {{kind}}"),
                    Ask(once(of("lease_age_seconds", HOST)), "age of {{kind}}, s"),
                ),
            ),
            Panel(
                "Leases that changed hands",
                "Jobs whose holder vanished; jobs given up since another might have them.",
                (
                    Ask(total(once(rate("lease_takeovers_total", HOST)), "host"), "taken over by {{host}}"),
                    Ask(total(once(rate("leases_lost_total", HOST)), "host"), "lost by {{host}}"),
                ),
                unit="ops",
            ),
            Panel(
                "From other hosts",
                "Connections through doors, open now; and new ones a second, by what became of them.",
                (
                    Ask(once(of("door_connections_open", HOST)), "open on {{host}}"),
                    Ask(total(once(rate("door_connections_total", HOST)), "result"), "{{result}} a second"),
                ),
            ),
        ),
    )


def snapshots() -> Any:
    """What there is to restore from."""
    have = Row(
        "Snapshots",
        (
            Panel(
                "Snapshots",
                "By model and state; a model without one that fits starts cold.",
                (Ask(most(of("snapshots", *_BOTH), "model, state"), "{{model}} {{state}}"),),
                "bars",
            ),
            Panel(
                "Bytes",
                "Of a model's snapshots.",
                (Ask(most(of("snapshot_bytes", *_BOTH), "host, model"), "{{model}} on {{host}}"),),
                unit="bytes",
            ),
            Panel(
                "Age",
                "Of the newest that fits.",
                (Ask(f"time() - {most(of('snapshot_newest_timestamp_seconds', *_BOTH), 'model')}", "{{model}}"),),
                unit="s",
            ),
            Panel(
                "Made",
                "Snapshots that were to be made, by result.",
                (Ask(total(once(of("captures_total", *_BOTH)), "model, result"), "{{model}} {{result}}"),),
                "bars",
            ),
            Panel(
                "Faults",
                "Found before CRIU saw anything.",
                (Ask(total(once(of("snapshot_faults_total", *_BOTH)), "model, kind"), "{{model}} {{kind}}"),),
                "bars",
            ),
        ),
    )
    said = "What there is to restore from, and the room for it."
    return board("snapshots", "Snapshots and storage", said, (have, _storage()), (MODELS, _HOSTS))


def _storage() -> Row:
    free, size = once(of("storage_free_bytes", HOST)), once(of("storage_size_bytes", HOST))
    return Row(
        "Storage",
        (
            Panel("Free", "On the disk that has the snapshots.", (Ask(free, "{{host}}"),), unit="bytes"),
            Panel("Used", "Of that disk.", (Ask(f"1 - {free} / {size}", "{{host}}"),), unit="percentunit"),
            Panel(
                "Remote store",
                "Pushed to it and pulled from it.",
                (Ask(or_zero(total(once(rate("remote_bytes_total", HOST)), "direction")), "{{direction}}"),),
                unit="Bps",
            ),
            Panel(
                "Pushes and pulls",
                "How long whole ones take, on average.",
                (Ask(or_zero(mean("remote_seconds", "direction", HOST)), "{{direction}}"),),
                "bars",
                "s",
            ),
        ),
    )


def gpu() -> Any:
    """Who has which GPU."""
    size, free = once(of("gpu_memory_size_bytes", HOST)), once(of("gpu_memory_free_bytes", HOST))
    leased, name = once(of("gpu_leased", HOST)), "{{host}} GPU {{gpu}}"
    memory = Row(
        "GPUs",
        (
            Panel("Memory in use", "Whoever uses it.", (Ask(f"{size} - {free}", name),), "areas", "bytes", width=12),
            Panel("Leased", "1 while an engine of ours has it.", (Ask(leased, name),), "states", width=12),
            Panel(
                "In use, but not by us",
                "Bytes in use on GPUs that nobody has leased: whose are they?",
                (Ask(f"({size} - {free}) * (1 - {leased})", name),),
                unit="bytes",
                width=12,
            ),
            Panel(
                "Stages on GPUs",
                "Of starts that moved state onto one, on average.",
                (Ask(mean("cold_start_seconds", "stage", HOST, 'stage=~".*GPU.*"'), "{{stage}}"),),
                "bars",
                "s",
                width=12,
            ),
        ),
    )
    return board("gpu", "GPU", "Who has which GPU, and what is free on it.", (memory,), (_HOSTS,))
