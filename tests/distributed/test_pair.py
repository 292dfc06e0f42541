"""The pair of processes that the tests of this folder share."""

import pytest

from tests.distributed.pair import launch

WHO = "import os, torch.distributed as dist; print(os.environ['RANK'], os.getpid(), os.getcwd())"
SUM = """
import torch, torch.distributed as dist
dist.is_initialized() or dist.init_process_group("gloo")
x = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(x)
print("sum", x.item())
"""


@pytest.mark.long
def test_one_pair_serves_several_launches_and_a_broken_one_is_replaced(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    first = launch([{"name": "who", "code": WHO}, {"name": "sum", "code": SUM}], folders[0])
    assert first.count("sum 3.0") == 2
    second = launch([{"name": "who", "code": WHO}], folders[1])
    pids = [[line.split()[1] for line in text.splitlines() if str(tmp_path) in line] for text in (first, second)]
    assert pids[0] == pids[1] and len(set(pids[0])) == 2
    assert str(folders[1]) in second and "sum" not in second
    with pytest.raises(AssertionError, match="CASE broken failed on rank 0"):
        launch([{"name": "broken", "code": "raise RuntimeError('no')"}], folders[2])
    third = launch([{"name": "who", "code": WHO}], folders[2])
    assert not set(pids[0]) & {line.split()[1] for line in third.splitlines() if str(tmp_path) in line}
