"""docs/monitoring/: Prometheus loads the rules, and they fire; the panels ask for what is there."""

import json
import re
import shlex
from functools import partial

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from django_redislock import single_instance
from django_redislock.management.commands.locks import Command
from django_redislock.management.metrics import GAUGES
from tests import ROOT
from tests.conftest import skip_or_fail
from tests.support.others import held_by_other
from tests.support.processes import hear, say
from tests.support.prometheus import MISSING, Prometheus, is_here, locks_metrics, promtool
from tests.support.servers import free_port
from tests.support.waiting import wait_until

RULES = ROOT / "docs" / "monitoring" / "prometheus-rules.yml"
DASHBOARD = ROOT / "docs" / "monitoring" / "grafana-dashboard.json"

# As OpenTelemetry's exporter for Prometheus spells the names in contrib/otel.
OF_PROCESSES = {
    "redislock_acquire_duration_seconds_bucket",
    "redislock_endangered_total",
    "redislock_held_duration_seconds_bucket",
    "redislock_lost_total",
    "redislock_renewal_failures_total",
    "redislock_runs_total",
    "redislock_unavailable_total",
    "redislock_waiters",
    "redislock_held",
}


@pytest.fixture(autouse=True)
def _with_prometheus():
    if not is_here():
        skip_or_fail(MISSING)


def expressions():
    """Of the panels, with values for Grafana's variables."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "1m").replace("$alias", ".*")


def unknown_in(written, read, path=""):
    """What is written and was not read as it is written."""
    if isinstance(written, dict) and isinstance(read, dict):
        pairs = [(key, value, read.get(key)) for key, value in written.items()]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = [
            (str(number), *both) for number, both in enumerate(zip(written, read, strict=True))
        ]
    else:
        return [] if written == read else [f"{path}: {written!r}"]
    return [one for key, *both in pairs for one in unknown_in(*both, f"{path}/{key}")]


@single_instance("nightly")
def nightly():
    return "done"


@single_instance("doomed", ttl=1)
def doomed():
    """In a child: run until it is killed."""
    say("began")
    hear()


def run_doomed():
    doomed()


@single_instance("broken")
def broken_nightly():
    raise ZeroDivisionError


@single_instance("import:{source}")
def import_from(source): ...


def test_each_command_that_an_alert_names_is_one():
    named = re.findall(r'description: ".*?manage\.py locks ([^"]+)"', RULES.read_text())
    assert len(named) > 8
    parser = Command().create_parser("manage.py", "locks")
    for one in named:
        parser.parse_args(shlex.split(re.sub(r"\{\{.*?\}\}", "held", one)))


@pytest.mark.slow
def test_promtool_accepts_the_rules_and_their_unit_tests():
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    tests = sorted((ROOT / "tests" / "operations").glob("prometheus_rules*_test.yml"))
    assert len(tests) == 2
    promtool("test", "rules", *map(str, tests))


def test_rules_and_panels_ask_for_metrics_that_exist():
    rules = re.sub(r"^\s*#.*", "", RULES.read_text(), flags=re.MULTILINE)
    for text in (rules, "\n".join(expressions())):
        asked = set(re.findall(r"\bredislock_\w+", text))
        assert asked - {*GAUGES} - OF_PROCESSES == set()


def test_the_dashboard_is_one_by_grafanas_own_schema():
    written = json.loads(DASHBOARD.read_text())
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert unknown_in(written, read) == []
    panels = [one for one in written["panels"] if one["type"] != "row"]
    assert len({one["id"] for one in written["panels"]}) == len(written["panels"])
    for one in panels:
        assert one["description"]
        assert all(each["datasource"]["uid"] == "${datasource}" for each in one["targets"])


@pytest.mark.slow
def test_faults_fire_alerts_in_a_running_prometheus(locks, settings, spawn, tmp_path):
    settings.REDISLOCK = {
        **settings.REDISLOCK,
        "gone": {"LOCATION": f"redis://127.0.0.1:{free_port()}/0"},
    }
    rules = re.sub(r"\bfor: \w+", "for: 0s", RULES.read_text())
    job = f"{__name__}.nightly"
    with Prometheus(tmp_path, partial(locks_metrics, "--no-doctor"), rules=rules) as prometheus:
        for expression in expressions():
            prometheus.query(expression)
        with held_by_other("nightly"):
            assert [nightly()["skipped"] for _ in range(3)] == ["busy"] * 3
            child = spawn(run_doomed)
            assert child.read() == "began"
            child.process.kill()
            expected = {
                ("RedislockOnlySkips", job),
                ("RedislockRunNeverEnded", f"{__name__}.doomed"),
                ("RedislockDown", "gone"),
            }
            wait_until(lambda: prometheus.firing() >= expected, every=0.1)
        assert nightly() == "done"
        wait_until(lambda: ("RedislockOnlySkips", job) not in prometheus.firing(), every=0.1)


@pytest.mark.slow
def test_what_others_hide_and_what_records_end_of_is_seen(locks, tmp_path):
    never = f"{__name__}.never"
    rules = re.sub(r"\bfor: \w+", "for: 0s", RULES.read_text())
    rules = rules.replace("> 26 * 3600", "> 1").replace("> 3600", "> 0")
    rules = re.sub(r"^( +)# (?=- alert|  )", r"\1", rules, flags=re.MULTILINE)
    rules = rules.replace("shop.tasks.nightly", never)
    broken, keyed = f"{__name__}.broken_nightly", f"{__name__}.import_from"
    with Prometheus(tmp_path, partial(locks_metrics, "--no-doctor"), rules=rules) as prometheus:
        import_from("a")
        with pytest.raises(ZeroDivisionError):
            broken_nightly()
        with held_by_other("import:a"):
            import_from("a")
            import_from("b")
            expected = {
                ("RedislockOnlySkips", keyed),
                ("RedislockNoSuccess", broken),
                ("RedislockOnlyFails", broken),
                ("RedislockNeverRan", never),
            }
            wait_until(lambda: prometheus.firing() >= expected, every=0.1)
        import_from("a")
        locks.redis.delete(*locks.keys())
        known = f'redislock_job_skips{{job_name="{broken}"}}'
        wait_until(lambda: not prometheus.query(known), every=0.1)
        wait_until(lambda: ("RedislockOnlyFails", broken) not in prometheus.firing(), every=0.1)
        assert {("RedislockNoSuccess", broken), ("RedislockNeverRan", never)} <= prometheus.firing()
        assert ("RedislockOnlySkips", keyed) not in prometheus.firing()
