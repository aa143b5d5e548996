"""What must go together in a recipe's `[cloud]`, as far as it can be told without data."""

from collections.abc import Mapping
from typing import Any

from personafl.cloud.mixing import check_mixing
from personafl.errors import BadInput
from personafl.recipe.cloud import CloudSection, check_no_cohorts


def check_cloud(cloud: CloudSection, federation: Mapping[str, Any]) -> None:
    """Fail if values do not go together, whatever the data; `federation` is the recipe's section."""
    check_no_cohorts(federation, "with [cloud] the first devices that ask take part; remove it, and set cloud.active")
    _check_first(cloud)
    _check_servers(cloud)
    _check_delays(cloud)
    if cloud.protocol != "gossip" and cloud.mixing is not None:
        raise BadInput(f'cloud.mixing: {cloud.protocol} has its own; remove it, or set cloud.protocol = "gossip"')
    if cloud.protocol == "gossip":
        if cloud.mixing is None:
            raise BadInput('cloud.mixing: gossip needs it; set it to "full", "ring", or a doubly stochastic matrix')
        check_mixing(cloud.mixing, cloud.servers)


def _check_first(cloud: CloudSection) -> None:
    if not cloud.asynchronous:
        if cloud.first is not None:
            raise BadInput(
                f'cloud.first: {cloud.protocol} waits for all servers; remove it, or set cloud.protocol = "async"'
            )
        return
    if cloud.first is None:
        raise BadInput(
            f"cloud.first: {cloud.protocol} needs it; say how many of the {cloud.servers} servers to wait for"
        )
    if cloud.first > cloud.servers:
        raise BadInput(f"cloud.first: waits for {cloud.first} servers, but there are only {cloud.servers}; lower it")


def _check_servers(cloud: CloudSection) -> None:
    """Check the lists of clients as far as it can be done without data."""
    if cloud.members is None:
        return
    if len(cloud.members) != cloud.servers:
        raise BadInput(
            f"cloud.members: has {len(cloud.members)} lists for {cloud.servers} servers; give one list per server"
        )
    found: dict[str, int] = {}
    for server, names in enumerate(cloud.members):
        if not names:
            raise BadInput(f"cloud.members[{server}]: a server without devices; name its clients, or remove the server")
        for name in names:
            if name in found:
                where = "is there twice" if found[name] == server else f"is in cloud.members[{found[name]}] too"
                raise BadInput(f"cloud.members[{server}]: {name!r} {where}; remove it from one")
            found[name] = server


def _check_delays(cloud: CloudSection) -> None:
    for index, own in enumerate(cloud.delays):
        if not (own.servers or own.devices) or (own.arrival is None and own.step is None):
            raise BadInput(f"cloud.delays[{index}]: say whose they are (servers, devices), and arrival or step")
        if far := [server for server in own.servers if server >= cloud.servers]:
            raise BadInput(
                f"cloud.delays[{index}].servers: there is no server {far[0]}; they are 0 to {cloud.servers - 1}"
            )
