"""Split a model of one's own and train it: torchrun --nproc-per-node 4 examples/train_own_model.py

On one process (python examples/train_own_model.py) the same file trains on one device.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tilewise as tw

if "RANK" in os.environ:
    dist.init_process_group("gloo")

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(inplace=True), nn.MaxPool3d(2),
    nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 4),
)  # fmt: skip
x, target = torch.randn(2, 1, 17, 16, 15), torch.randn(2, 4)

mesh = tw.Mesh()
plan = {1: "1", 2: "d2", 4: "d2 h2", 8: "n2 d2 h2"}.get(mesh.size, f"d{mesh.size}")
pmodel = tw.parallelize(model, x, plan, loss=F.mse_loss, mesh=mesh)
optimizer = torch.optim.AdamW(pmodel.parameters(), lr=1e-3)
x_slab, target_slab = pmodel.scatter(x, target)
for step in range(5):
    loss = pmodel.loss(x_slab, target_slab)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if mesh.rank == 0:
        print(
            f"step {step}: loss {loss.item():.6f}, slab {tuple(x_slab.shape)} of {tuple(x.shape)}"
        )
