"""A recipe as a Flower app: for those who already run a SuperLink and SuperNodes.

    messages   what is said: the messages of `deploy`, in Flower's records
    client     a ClientApp: one device, as `deploy.device.training` trains it
    server     a ServerApp: the rounds of `deploy.server.rounds`, over a Grid
    app        the folder that `flwr run` takes

No algorithm code here, and no second way to check an update or to keep a state: those are `deploy`'s.
"""

from personafl.flower.client import client_app
from personafl.flower.server import server_app

__all__ = ["client_app", "server_app"]
