"""Two processes over gloo: data parallel, fully sharded, and attention split by batch or heads."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fastattn
from fastattn.testing import Inputs

pytestmark = pytest.mark.slow
PROCESSES = 2


def processes(function):
    """``function(rank)`` in each of two processes; an assertion that fails in one fails here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_process, (function, port), nprocs=PROCESSES)


def _process(rank, function, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    try:
        function(rank)
    finally:
        dist.destroy_process_group()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, Inputs().normal(4, 5, 8, dtype=torch.float64)


def whole_gradients(model, x):
    model = copy.deepcopy(model)
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def data_parallel(rank):
    model, x = encoder()
    expected = whole_gradients(model, x)
    fastattn.replace_attention(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(x[2 * rank : 2 * rank + 2]).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad * PROCESSES, expected[name])


def fully_sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model, x = encoder()
    expected = whole_gradients(model, x)
    fastattn.replace_attention(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(x[2 * rank : 2 * rank + 2]).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor() * PROCESSES, expected[name])


def split(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import fastattn.integrations.distributed  # noqa: F401

    mesh = init_device_mesh("cpu", (PROCESSES,))
    inputs = Inputs()
    q, k, v = (inputs.normal(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 3), (2, 5), (2, 5)))
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]).bool()
    for dim in (0, 1):
        for shape in ((1, 1, 3, 5), (2, 4, 3, 5)):
            mask = inputs.normal(*shape, dtype=torch.float64)
            leaves = [x.clone().requires_grad_() for x in (q, k, v, mask)]
            expected = attend(*leaves, padding)
            expected.square().sum().backward()
            whole = shape[dim] == 1
            places = [Shard(dim)] * 3 + [Replicate() if whole else Shard(dim)]
            spread = [
                distribute_tensor(x.detach(), mesh, [place]).requires_grad_()
                for x, place in zip(leaves, places, strict=True)
            ]
            hidden = distribute_tensor(padding, mesh, [Shard(0) if dim == 0 else Replicate()])
            found = attend(*spread, hidden)
            assert found.placements == (Shard(dim),)
            torch.testing.assert_close(found.full_tensor(), expected)
            found.square().sum().backward()
            for x, leaf in zip(spread, leaves, strict=True):
                torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)


def attend(query, key, value, mask, padding):
    return fastattn.scaled_dot_product_attention(
        query, key, value, mask, is_causal=True, enable_gqa=True, key_padding_mask=padding
    )


@pytest.mark.parametrize("function", [data_parallel, fully_sharded, split])
def test_two_processes_compute_what_one_does(function):
    processes(function)
