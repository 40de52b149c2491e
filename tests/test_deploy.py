"""What is under deploy/, each file checked by the tool that reads it: shell, systemd, container builders, Compose, Kubernetes.

That an installed unit works with the rights that it has is shown by tests/deploy, on a booted system (`make test-deploy`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
from compose_spec import PyCompose
from conftest import require_root

from policies import config

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch"), ROOT / ".ci/run"])
UNITS = sorted((DEPLOY / "systemd").iterdir())
EXPOSED = {"rewake-gateway.service": 1.5, "rewake-restorer.service": 7.2, "rewake.service": 7.9}
"""The most that `systemd-analyze security` may find, of 10. The restorer may have no system call filter, which is most of its."""
KUBERNETES = "1.32"
FOLDERS = ("base", "example")


def tool(*names: str) -> str:
    """The first of these programs that is there, of this environment or of the system; skipped without, fails in CI."""
    for name in names:
        beside = Path(sys.executable).with_name(name)
        found = str(beside) if beside.exists() else shutil.which(name)
        if found:
            return found
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {' or '.join(names)}")


def run(*argv: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, **more)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---------------------------------------------------------------- scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_shellcheck_finds_nothing_in(script: Path) -> None:
    checked = run(tool("shellcheck"), "--external-sources", "--source-path=SCRIPTDIR", script)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.name != "debian-tool.sh"], ids=name)
def test_scripts_can_be_run_and_say_how(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert re.search(r"^# (Usage:|What CI runs|Usage)", script.read_text(), re.MULTILINE)


Elsewhere = Callable[..., subprocess.CompletedProcess[str]]


def host(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run(DEPLOY / "install/host.sh", *arguments, env=os.environ | environ)


def test_a_dry_run_of_the_installation_says_all_and_does_nothing(tmp_path: Path) -> None:
    prefix = tmp_path / "rewake"
    said = host("--dry-run", "--prefix", str(prefix), "--criu", "/bin/true", PYTHON=sys.executable)
    assert said.returncode == 0, said.stderr
    steps = [line for line in said.stdout.splitlines() if line.startswith("would run: ")]
    for step in (
        "-m venv",
        "-m pip install",
        f"mv -T {prefix}/.venv.new {prefix}/venv",
        "useradd --system",
        "/etc/systemd/system",
    ):
        assert any(step in each for each in steps), step
    assert not prefix.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--what",), "what is '--what'?"),
        (("--prefix",), "--prefix wants a value"),
        (("--prefix", "/usr", "--dry-run"), "choose a folder that is Rewake's alone"),
        (("--prefix", "/a b", "--dry-run"), "no spaces"),
        (("--dry-run", "--criu", "/nowhere/criu"), "--criu /nowhere/criu: no such program"),
    ],
)
def test_what_cannot_be_installed_is_said(arguments: tuple[str, ...], said: str) -> None:
    tried = host(*arguments, PYTHON=sys.executable)
    assert tried.returncode in (1, 2)
    assert said in tried.stderr


HOSTS = {
    "Debian 12": "ID=debian\nVERSION_ID=12\n",
    "Debian 13": "ID=debian\nVERSION_ID=13\n",
    "Ubuntu 22.04": "ID=ubuntu\nID_LIKE=debian\nVERSION_ID=22.04\n",
    "Ubuntu 24.04": "ID=ubuntu\nID_LIKE=debian\nVERSION_ID=24.04\n",
    "Linux Mint": 'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_ID=22\n',
}
OTHERS = {
    "Fedora": "ID=fedora\nVERSION_ID=42\n",
    "Rocky Linux": 'ID=rocky\nID_LIKE="rhel centos fedora"\n',
    "Alpine": "ID=alpine\n",
    "nothing": "",
}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    """Runs host.sh as on another system: its /etc/os-release, and its apt, which has these packages and installs none."""
    require_root()

    def ran(os_release: str, *arguments: str, has: Sequence[str] = (), **environ: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "os-release").write_text(os_release)
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        candidates = "|".join(has) or "none"
        policy = f"case $2 in {candidates}) echo '  Candidate: 3.99' ;; *) echo '  Candidate: (none)' ;; esac"
        uris = "echo \"'http://archive.ubuntu.com/ubuntu/dists/noble/InRelease' file 0\""
        for program, does in {"apt-cache": policy, "apt-get": uris}.items():
            (tools / program).write_text(f"#!/bin/sh\n{does}\n")
            (tools / program).chmod(0o755)
        inside = 'mount --bind "$0" /etc/os-release && exec "$@"'
        argv = ["unshare", "--mount", "sh", "-c", inside, tmp_path / "os-release", DEPLOY / "install/host.sh", *arguments]
        return run(*argv, env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"} | environ)

    return ran


@pytest.fixture
def old_python(tmp_path: Path) -> str:
    """One of a system whose own is too old, as Ubuntu 22.04's 3.10."""
    program = tmp_path / "python3.10"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("system", HOSTS)
def test_every_system_that_is_named_is_taken(system: str, elsewhere: Elsewhere, tmp_path: Path) -> None:
    tried = elsewhere(HOSTS[system], "--dry-run", "--prefix", f"{tmp_path}/rewake", "--criu", "/bin/true", PYTHON=sys.executable)
    assert tried.returncode == 0, tried.stderr
    assert "-m venv" in tried.stdout


@pytest.mark.parametrize("system", OTHERS)
def test_other_systems_are_told_what_to_do_instead(system: str, elsewhere: Elsewhere) -> None:
    tried = elsewhere(OTHERS[system], "--dry-run", "--criu", "/bin/true", PYTHON=sys.executable)
    assert tried.returncode == 1
    assert "neither Debian nor Ubuntu" in tried.stderr
    assert "pip install ." in tried.stderr


@pytest.mark.parametrize(
    ("has", "takes"), [(["python3.11"], "python3.11"), (["python3.11", "python3.12"], "python3.12"), ([], "")], ids=str
)
def test_where_the_systems_python_is_too_old_the_archives_newest_comes_beside_it(
    elsewhere: Elsewhere, old_python: str, has: list[str], takes: str, tmp_path: Path
) -> None:
    """As on Ubuntu 22.04."""
    arguments = ("--dry-run", "--compiler", "--prefix", f"{tmp_path}/rewake", "--criu", "/bin/true")
    tried = elsewhere(HOSTS["Ubuntu 22.04"], *arguments, has=has, PYTHON=old_python, CC="/bin/false")
    if takes:
        assert tried.returncode == 0, tried.stderr
        assert f"installing packages: {takes} {takes}-venv gcc {takes}-dev" in tried.stderr
        assert f"/usr/bin/{takes} -m venv" in tried.stdout
    else:
        assert tried.returncode == 1
        assert "no Python 3.11 or newer" in tried.stderr


def test_criu_where_apt_knows_no_debian_mirror(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """As on Ubuntu: what to do is said, and one that is named is asked."""
    program = DEPLOY / "install/criu.sh"
    path = {"PATH": f"{tmp_path}/tools:/usr/bin:/bin"}
    elsewhere(HOSTS["Ubuntu 24.04"], "--dry-run", "--criu", "/bin/true", PYTHON=sys.executable)  # puts the tools there
    tried = run(program, tmp_path / "criu", env=os.environ | path)
    assert tried.returncode == 1
    assert "names no Debian archive" in tried.stderr
    assert "REWAKE_DEBIAN_MIRROR=URI" in tried.stderr
    assert "debian-archive-keyring" in tried.stderr
    named = run(program, tmp_path / "criu", env=os.environ | path | {"REWAKE_DEBIAN_MIRROR": "http://debian.example/debian/"})
    assert "looking for criu >= 4.2 at http://debian.example/debian (sid)" in named.stderr


@pytest.mark.parametrize(("option", "compiles"), [("--compiler", True), ("--interpreted", False)])
def test_the_data_path_is_compiled_or_not_as_is_asked(option: str, compiles: bool, tmp_path: Path) -> None:
    said = host("--dry-run", option, "--prefix", str(tmp_path / "rewake"), "--criu", "/bin/true", PYTHON=sys.executable)
    assert said.returncode == 0, said.stderr
    assert ("REWAKE_COMPILE=1" in said.stdout) is compiles
    assert ("the data path is interpreted" in said.stderr) is not compiles


# ---------------------------------------------------------------- systemd


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, with programs that are there in the place of those that host.sh installs."""
    for unit in UNITS:
        text = re.sub(r"/opt/rewake/venv/bin/rewake", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    return tmp_path


def test_systemd_understands_every_line_of_the_units(installed: Path) -> None:
    checked = run(tool("systemd-analyze"), "verify", "--man=no", *sorted(installed.iterdir()))
    ours = [line for line in (checked.stdout + checked.stderr).splitlines() if "rewake" in line]
    assert not ours


@pytest.mark.parametrize("unit", EXPOSED)
def test_units_are_as_hardened_as_they_can_be(unit: str, installed: Path) -> None:
    checked = run(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", installed / unit)
    score = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", checked.stdout)
    assert score is not None, checked.stdout + checked.stderr
    assert float(score[1]) <= EXPOSED[unit]


_FILTERS = (
    *("SystemCallFilter", "SystemCallArchitectures", "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime"),
    *("RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute", "ProtectKernelTunables", "ProtectKernelModules"),
    *("ProtectKernelLogs", "ProtectClock", "ProtectHostname", "PrivateDevices"),
)


@pytest.mark.parametrize("unit", ["rewake.service", "rewake-restorer.service"])
def test_whoever_runs_criu_is_under_no_seccomp_filter(unit: str) -> None:
    """The kernel lets nobody suspend or read an engine's filter who has one himself."""
    text = (DEPLOY / "systemd" / unit).read_text()
    assert not re.findall(rf"^(?:{'|'.join(_FILTERS)})=", text, re.MULTILINE)


def capabilities(unit: str) -> set[str]:
    text = (DEPLOY / "systemd" / unit).read_text()
    return {each for line in re.findall(r"^CapabilityBoundingSet=(.*)", text, re.MULTILINE) for each in line.split()}


def test_the_restorer_has_the_same_capabilities_everywhere() -> None:
    least = capabilities("rewake-restorer.service")
    assert least == {"CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_NET_ADMIN", "CAP_SYS_TIME"}
    assert least < capabilities("rewake.service")
    assert not capabilities("rewake-gateway.service")
    restorer = compose()["services"]["restorer"]
    pod = next(each for each in resources("base") if each["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    assert {f"CAP_{each}" for each in restorer["cap_add"]} == least
    # A door becomes somebody else, and that one's processes must still be ended.
    doors = {"CAP_SETUID", "CAP_SETGID", "CAP_KILL"}
    assert doors < capabilities("rewake.service")
    assert {f"CAP_{each}" for each in pod["containers"][0]["securityContext"]["capabilities"]["add"]} == least | doors


# ---------------------------------------------------------------- containers


def test_hadolint_finds_nothing_in_the_containerfile() -> None:
    checked = run(tool("hadolint"), "--config", ROOT / ".hadolint.yaml", DEPLOY / "containers/Containerfile")
    assert checked.returncode == 0, checked.stdout


def compose() -> dict[str, Any]:
    """The Compose file with the defaults of its variables, as a user who sets none has it."""
    text = (DEPLOY / "containers/compose.yaml").read_text()
    document: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return document


def test_the_compose_file_is_one() -> None:
    document = compose()
    parsed = PyCompose.from_yaml(yaml.safe_dump(document))
    assert set(parsed.service_names()) == {"redis", "restorer", "gateway"}
    gateway, restorer = document["services"]["gateway"], document["services"]["restorer"]
    assert gateway["network_mode"] == "service:restorer"  # a replica's address leads to it from there alone
    assert gateway["cap_drop"] == ["ALL"]
    assert "cap_add" not in gateway
    assert gateway["read_only"]
    assert "seccomp:unconfined" in restorer["security_opt"]
    assert "privileged" not in restorer
    for service in (gateway, restorer):
        file = (DEPLOY / "containers" / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
        assert f"AS {service['build']['target']}\n" in file.read_text()


# ---------------------------------------------------------------- Kubernetes


def resources(folder: str) -> list[dict[str, Any]]:
    """Every object that the folder's own files describe."""
    found: list[dict[str, Any]] = []
    for file in sorted((DEPLOY / "kubernetes" / folder).glob("*.yaml")):
        found += [each for each in yaml.safe_load_all(file.read_text()) if each and each.get("kind") and "apiVersion" in each]
    return [each for each in found if each["kind"] not in ("Kustomization", "Component")]


def built(folder: str) -> list[dict[str, Any]]:
    command = [tool("kubectl"), "kustomize"] if shutil.which("kubectl") else [tool("kustomize"), "build"]
    made = run(*command, DEPLOY / "kubernetes" / folder)
    assert made.returncode == 0, made.stderr
    return [*yaml.safe_load_all(made.stdout)]


@pytest.mark.parametrize("resource", resources("base"), ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_resources_are_what_kubernetes_takes(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@pytest.mark.skipif(not (shutil.which("kubectl") or shutil.which("kustomize")), reason="needs kubectl or kustomize")
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_kustomize_builds_is_whole(folder: str) -> None:
    objects = built(folder)
    for each in objects:
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "rewake"
    there = {(each["kind"], each["metadata"]["name"]) for each in objects}
    text = json.dumps(objects)
    for claim in re.findall(r'"configMap": \{"name": "([^"]+)"', text):
        assert ("ConfigMap", claim) in there
    if folder == "example":
        for secret in re.findall(r'"secretKeyRef": \{"key": "password", "name": "([^"]+)"', text):
            assert ("Secret", secret) in there
        images = {image for image in re.findall(r'"image": "([^"]+)"', text) if "redis" not in image}
        assert all(image.startswith("registry.example.org/") for image in images)


def test_the_alert_rules_fit_their_resource_definition_and_are_those_of_prometheus() -> None:
    [document] = [one for one in resources("monitoring") if one["kind"] == "PrometheusRule"]
    assert PrometheusRule.model_validate(document).spec is not None
    assert document["spec"] == yaml.safe_load((ROOT / "grafana/alerts.yaml").read_text())


def test_the_service_monitor_fits_its_resource_definition() -> None:
    [document] = [one for one in resources("monitoring") if one["kind"] == "ServiceMonitor"]
    read = ServiceMonitor.model_validate(document)
    # What is no field of it would be lost on the way.
    assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == document


def test_gateways_on_kubernetes_have_nothing_to_lose() -> None:
    pod = next(each for each in resources("base") if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert not pod["automountServiceAccountToken"]


def test_gateways_on_kubernetes_may_connect_to_every_door() -> None:
    for folder in FOLDERS:
        expose = config.parse(filled(DEPLOY / "kubernetes" / folder / "rewake.yaml")).restorer.expose
        assert expose is not None
        policies = {each["metadata"]["name"]: each["spec"] for each in resources("base") if each["kind"] == "NetworkPolicy"}
        open_ports = [one for rule in policies["rewake-gateway"]["egress"] for one in rule["ports"] if "endPort" in one]
        assert [range(one["port"], one["endPort"] + 1) for one in open_ports] == [expose.range]
    objects = {each["kind"]: each for each in resources("base")}
    assert "hostNetwork" not in objects["Deployment"]["spec"]["template"]["spec"]
    assert objects["DaemonSet"]["spec"]["template"]["spec"]["hostNetwork"]


def test_selectors_find_their_pods() -> None:
    objects = resources("base")
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in objects if "template" in each.get("spec", {})]
    selectors = [each["spec"]["selector"] for each in objects if each["kind"] == "Service"]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in objects if each["kind"] == "PodDisruptionBudget"]
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in policies if each["spec"]["podSelector"]]
    assert len(selectors) == 5
    assert all(any(selector.items() <= labels.items() for labels in pods) for selector in selectors)


# ---------------------------------------------------------------- configurations


def filled(file: Path) -> Any:
    """As the file is used: its placeholders replaced."""
    text = file.read_text().replace("@NODE@", "node-1").replace("@ADDRESS@", "10.0.0.5")
    return yaml.safe_load(text.replace("@REDIS_PASSWORD@", "secret"))


@pytest.mark.parametrize("file", sorted([*DEPLOY.rglob("rewake*.yaml"), DEPLOY / "examples/starter.yaml"]), ids=name)
def test_configurations_can_be_read(file: Path) -> None:
    assert config.parse(filled(file)).models


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_fills_in_a_nodes_settings_does(folder: str, tmp_path: Path) -> None:
    """The program in the pods' init containers, run as it stands there, with a password that no URL takes as it is."""
    for kind in ("Deployment", "DaemonSet"):
        pod = next(each for each in resources("base") if each["kind"] == kind)["spec"]["template"]["spec"]
        program = pod["initContainers"][0]["command"][-1]
        program = program.replace("/settings/", f"{DEPLOY}/kubernetes/{folder}/").replace("/etc/rewake/", f"{tmp_path}/")
        env = {"NODE": "gpu-7.example.org", "ADDRESS": "10.0.0.7", "REDIS_PASSWORD": "a/b@c:d#e"}
        done = run(sys.executable, "-c", program, env=env)
        assert done.returncode == 0, done.stderr
        parsed = config.parse(yaml.safe_load((tmp_path / "rewake.yaml").read_text()))
        assert parsed.restorer.host == "gpu-7.example.org"
        assert parsed.restorer.expose is not None
        assert parsed.restorer.expose.address == "10.0.0.7"
        assert parsed.store.url == "redis://:a%2Fb%40c%3Ad%23e@rewake-redis.rewake.svc:6379/0"
