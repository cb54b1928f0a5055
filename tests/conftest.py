"""One torch thread: two on a busy machine were seen many times slower. And a W&B server, for those who ask for one."""

import pytest
import torch

from tests.wandb_server import Server

torch.set_num_threads(1)


@pytest.fixture
def server(tmp_path):
    """A running openwandb server."""
    server = Server(tmp_path)
    try:
        yield server
    finally:
        server.stop()
