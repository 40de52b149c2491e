"""The dashboards about requests: the fleet, one model, tenants. Each is what somebody wants to know."""

from __future__ import annotations

from typing import Any

from grafana.panels import MODEL, TENANT, Ask, Panel, Row, board, most, of, once, or_zero, quantile, rate, total

MODELS = ("model", "label_values(rewake_model_demand, model)")
_TENANTS = ("tenant", "label_values(rewake_tenant_held_requests, tenant)")
_MODEL = "{{model}}"
_NUMBER = 3


def _number(title: str, said: str, expression: str, unit: str = "short") -> Panel:
    return Panel(title, said, (Ask(expression),), "number", unit, width=_NUMBER)


def fleet() -> Any:
    """Is it well?"""
    failed, answered = total(rate("requests_total", 'code=~"5.."')), total(rate("requests_total"))
    now = Row(
        "Now",
        (
            _number("Gateways", "Live workers, over all hosts.", "max(rewake_gateways)"),
            _number("Hosts", "Whose restorers report.", total(once(of("host_up")))),
            _number("Store", "1 while every gateway reaches it.", "min(rewake_store_connected)"),
            _number(
                "Admitted",
                "Replicas that take requests.",
                or_zero(total(most(of("replica_state", 'state="admitted"'), "replica"))),
            ),
            _number("Held", "Requests that wait for a replica.", total(of("queue_depth"))),
            _number("In flight", "Requests on replicas.", or_zero(total(of("inflight_requests")))),
            _number(
                "Failed",
                "Answers with a 5xx status, of all.",
                f"({or_zero(failed)}) / clamp_min({answered}, 1e-9)",
                "percentunit",
            ),
            _number("Models failed", "No start of them is tried for now.", total(most(of("model_failed"), "model"))),
        ),
    )
    return board("fleet", "Fleet", "Is it well? All hosts and models at a glance.", (now, _traffic(), _life()))


def _traffic() -> Row:
    first_byte = "time_to_first_byte_seconds"
    return Row(
        "Requests",
        (
            Panel(
                "Answers",
                "By status; 499: the client left.",
                (Ask(total(rate("requests_total"), "code"), "{{code}}"),),
                "areas",
                "reqps",
            ),
            Panel(
                "Time to first byte",
                "From the request's head, time held included.",
                (
                    Ask(quantile(0.5, first_byte, "start"), "p50 {{start}}"),
                    Ask(quantile(0.95, first_byte, "start"), "p95 {{start}}"),
                ),
                unit="s",
            ),
            Panel("Held, by model", "Requests that wait.", (Ask(total(of("queue_depth"), "model"), _MODEL),), "areas"),
            Panel(
                "Errors",
                "Of the gateway itself.",
                (Ask(or_zero(total(rate("errors_total"), "code")), "{{code}}"),),
                unit="reqps",
            ),
            Panel(
                "Clients that left",
                "By what their request was doing.",
                (Ask(or_zero(total(rate("client_disconnects_total"), "phase")), "{{phase}}"),),
                unit="reqps",
            ),
            Panel(
                "Sent again, broken off",
                "Requests sent a second time; answers without an end; replicas that get nothing for a while.",
                (
                    Ask(or_zero(total(rate("upstream_retries_total"), "reason")), "again: {{reason}}"),
                    Ask(or_zero(total(rate("truncated_responses_total"), "reason")), "broken off: {{reason}}"),
                    Ask(or_zero(total(rate("ejections_total"), "model")), "ejected: {{model}}"),
                ),
                unit="reqps",
            ),
        ),
    )


def _life() -> Row:
    return Row(
        "Replicas and processes",
        (
            Panel(
                "Replicas",
                "By state.",
                (Ask(total(most(of("replica_state"), "replica, state"), "state"), "{{state}}"),),
                "areas",
            ),
            Panel(
                "Starts",
                "By result.",
                (Ask(or_zero(total(once(rate("restores_total")), "result")), "{{result}}"),),
                unit="ops",
            ),
            Panel(
                "Asked for",
                "Operations that demand began, and requests for replicas that were under way.",
                (Ask(or_zero(total(rate("scale_up_triggers_total"), "deduped")), "deduped: {{deduped}}"),),
                unit="ops",
            ),
            Panel(
                "Event loop",
                "How late it is; beyond a tenth of a second clients notice.",
                (Ask("max(rewake_loop_lag_seconds)", "worst"),),
                unit="s",
            ),
            Panel(
                "Lost",
                "Lines of the access log and spans that were dropped rather than slow requests down.",
                (
                    Ask(total(rate("access_log_lost_lines_total")), "lines"),
                    Ask(or_zero(total(rate("spans_total", 'result!="exported"'))), "spans"),
                ),
                unit="ops",
            ),
            Panel(
                "Restorer's memory",
                "Resident.",
                (Ask(once(of("restorer_memory_bytes")), "{{host}}"),),
                unit="bytes",
            ),
            Panel(
                "Configuration",
                "1: the last reload was taken up.",
                (Ask("min(rewake_config_last_reload_successful)", "taken up"),),
                "states",
                width=12,
            ),
            Panel(
                "Versions",
                "Of gateways, and whether their data path is compiled.",
                (Ask("count by (version, data_path) (rewake_build_info)", "{{version}} {{data_path}}"),),
                "bars",
                width=12,
            ),
        ),
    )


def model() -> Any:
    """Who waits for it, what they get."""
    wait = "queue_wait_seconds"
    wants = Row(
        "Demand",
        (
            Panel(
                "Demand",
                "Held, in flight, or turned away a moment ago with a promise.",
                (Ask(total(of("model_demand", MODEL), "model"), _MODEL),),
            ),
            Panel(
                "Queue",
                "Held requests, and the bound at which more are refused.",
                (
                    Ask(total(of("queue_depth", MODEL), "model"), _MODEL),
                    Ask(total(of("queue_limit_requests", MODEL), "model"), "bound of {{model}}"),
                ),
            ),
            Panel(
                "Bytes held",
                "Bodies of held requests.",
                (Ask(total(of("queue_bytes", MODEL), "model"), _MODEL),),
                unit="bytes",
            ),
            Panel(
                "Time held",
                "By how it ended.",
                (
                    Ask(quantile(0.5, wait, "outcome", MODEL), "p50 {{outcome}}"),
                    Ask(quantile(0.95, wait, "outcome", MODEL), "p95 {{outcome}}"),
                ),
                unit="s",
            ),
            Panel(
                "Estimates",
                "Time held by the time that was expected when it began: 1 is as foretold, 2 is twice as long.",
                (Ask(f"{total(of('eta_ratio_sum', MODEL), 'model')} / {total(of('eta_ratio_count', MODEL), 'model')}", _MODEL),),
            ),
            Panel(
                "Parked when",
                "If nothing more came; long ago: nothing runs.",
                (Ask(f"{most(of('session_expires_at_timestamp_seconds', MODEL), 'model')} * 1000", _MODEL),),
                "number",
                "dateTimeFromNow",
            ),
        ),
    )
    return board("model", "Model", "One model: who waits for it, what they get.", (wants, _answers()), (MODELS,))


def _answers() -> Row:
    return Row(
        "Answers",
        (
            Panel(
                "Answers",
                "By status.",
                (Ask(total(rate("requests_total", MODEL), "model, code"), "{{model}} {{code}}"),),
                "areas",
                "reqps",
            ),
            Panel(
                "Whole answers",
                "From head to end.",
                (Ask(quantile(0.95, "request_seconds", "model", MODEL), "p95 {{model}}"),),
                unit="s",
            ),
            Panel(
                "Tokens a second",
                "As the engines count them.",
                (Ask(total(rate("tokens_total", MODEL), "model, kind"), "{{model}} {{kind}}"),),
            ),
            Panel(
                "On replicas",
                "Requests in flight on each.",
                (Ask(total(of("inflight_requests", MODEL), "replica"), "{{replica}}"),),
            ),
            Panel(
                "States",
                "What each slot does.",
                (Ask(f"{most(of('replica_state', MODEL), 'replica, state')} == 1", "{{replica}} {{state}}"),),
                "states",
            ),
            Panel(
                "Repetitions",
                "Requests that an SDK sent again.",
                (Ask(or_zero(total(rate("client_retries_total", MODEL), "model")), _MODEL),),
                unit="reqps",
            ),
        ),
    )


def tenants() -> Any:
    """Who uses what."""
    asked = total(rate("tenant_requests_total", TENANT), "tenant")
    failed = total(rate("tenant_requests_total", TENANT, 'code=~"[45].."'), "tenant")
    use = Row(
        "Use",
        (
            Panel("Requests", "By tenant.", (Ask(asked, "{{tenant}}"),), "areas", "reqps"),
            Panel(
                "Tokens a second",
                "By tenant and kind, as the engines count them.",
                (Ask(total(rate("tenant_tokens_total", TENANT), "tenant, kind"), "{{tenant}} {{kind}}"),),
            ),
            Panel(
                "Models",
                "Who asks for which.",
                (Ask(total(of("tenant_requests_total", TENANT), "tenant, model"), "{{tenant}} {{model}}"),),
                "bars",
            ),
            Panel(
                "In flight",
                "Requests on replicas.",
                (Ask(total(of("tenant_inflight_requests", TENANT), "tenant"), "{{tenant}}"),),
                "areas",
            ),
            Panel(
                "Held",
                "Requests that wait.",
                (Ask(total(of("tenant_held_requests", TENANT), "tenant"), "{{tenant}}"),),
                "areas",
            ),
            Panel(
                "Refused for a limit",
                "By limit.",
                (Ask(or_zero(total(rate("rate_limited_total", TENANT), "tenant, limit")), "{{tenant}} {{limit}}"),),
                unit="reqps",
            ),
            Panel(
                "Failed",
                "Part of a tenant's answers with a 4xx or 5xx status.",
                (Ask(f"({failed} or 0 * {asked}) / clamp_min({asked}, 1e-9)", "{{tenant}}"),),
                unit="percentunit",
            ),
        ),
    )
    return board("tenants", "Tenants", "Who uses what, and who is held back.", (use,), (_TENANTS,))
