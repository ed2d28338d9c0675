"""Tests of bench/ run on a CPU; `bench.qualify` puts the helpers of tests/support on the path."""

import torch

import bench.qualify  # noqa: F401


def pytest_configure(config):
    torch.set_num_threads(1)  # small problems wait longer for a second thread than they compute
