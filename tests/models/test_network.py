"""The record of a network in model files: the text that files of earlier versions have, and what is read from it."""

import pytest
from pydantic import ValidationError

from personafl.models.modelfile import Card, network_text
from personafl.models.network import Network, SharedNetwork

REST = {
    "run": "r",
    "method": "fedavg",
    "model": "global",
    "task": "classification",
    "input_shape": "[1, 8, 8]",
    "target_shape": "[]",
    "classes": "10",
    "parameters": "1",
    "parameters_dense": "1",
    "bytes_packed": "1",
    "bytes_dense": "1",
}
CASES = [
    (
        SharedNetwork(name="mlp", personal=("0.*",), adapter="lora", adapter_size=2, hidden=[8, 4]),  # type: ignore[call-arg]
        '{"name":"mlp","options":{"hidden":[8,4]},"buffers":"refused","personal":["0.*"],"adapter":"lora","adapter_size":2}',
    ),
    (
        Network(name="cnn", buffers="dropped", hidden=7),  # type: ignore[call-arg]
        '{"name":"cnn","options":{"hidden":7},"buffers":"dropped","personal":null,"adapter":null,"adapter_size":1}',
    ),
    (
        SharedNetwork(name=""),
        '{"name":null,"options":{},"buffers":"refused","personal":null,"adapter":null,"adapter_size":16}',
    ),
]


@pytest.mark.parametrize(("network", "text"), CASES)
def test_the_text_in_a_file_is_that_of_earlier_versions_and_is_read_back(network: Network, text: str) -> None:
    assert network_text(network) == text
    read = Card.model_validate({**REST, "network": text}).network
    assert read.whole == (network.whole if isinstance(network, SharedNetwork) else network)
    if isinstance(network, SharedNetwork):
        assert read == network


@pytest.mark.parametrize(
    "text", ["[]", '"mlp"', '{"name":"mlp"}', '{"name":"mlp","options":[1]}', '{"options":{}', "1"]
)
def test_a_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="network"):
        Card.model_validate({**REST, "network": text})


def test_options_do_not_pass_for_the_record_itself() -> None:
    text = '{"name":"mlp","options":{"name":"os:system","buffers":"shared"},"buffers":"refused","personal":null}'
    read = Card.model_validate({**REST, "network": text}).network
    assert (read.name, read.buffers) == ("mlp", "refused")
