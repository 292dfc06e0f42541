"""Two processes give the result of one: clients over ranks (DDP), and ranks over one client's model (FSDP2)."""

import pytest
import torch

from tests.distributed.pair import launch
from tests.fedhpro import two_processes

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fedhpro")
    code = f"from tests.fedhpro.two_processes import run; run({str(folder)!r})"
    output = launch([{"name": "fedhpro", "run": str(folder), "code": code}], folder)
    assert "CASE" not in output, output[-4000:]
    two_processes.run(str(folder))
    return folder


@pytest.mark.parametrize("name", [*two_processes.DDP, *two_processes.FSDP2])
def test_two_processes_equal_one(folder, name):
    one, two = (torch.load(folder / f"{name} {world}.ckpt", weights_only=True) for world in (1, 2))
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for key, value in one["state_dict"].items():
        # per-sample gradients are summed in another order when ranks share a batch
        atol = 1e-6 if name in two_processes.DDP else 1e-5
        torch.testing.assert_close(two["state_dict"][key], value, atol=atol, rtol=0, msg=lambda m, k=key: f"{k}: {m}")
    assert one["client_states"].keys() == two["client_states"].keys()
    logged = [torch.load(folder / f"{name} {world}.logged", weights_only=True) for world in (1, 2)]
    assert logged[0].keys() == logged[1].keys()
    for key, value in logged[0].items():
        assert logged[1][key] == pytest.approx(value, abs=1e-3), key
