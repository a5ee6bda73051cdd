"""Give every layer its own split: torchrun --nproc-per-node 4 examples/plan_by_hand.py"""

import os

import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.models import alexnet

if "RANK" in os.environ:
    dist.init_process_group("gloo")

torch.manual_seed(0)
model = alexnet(width=0.25, num_classes=10, dropout=0.0)
x = torch.randn(4, 3, 64, 64)
mesh = tw.Mesh()
p = mesh.size

# Convolutions by space while images are large, by samples where they are small, and the linear
# layers, which hold most parameters, by filters. The last pattern that matches a layer wins;
# layers that no pattern names follow the layer before them.
graph = tw.capture(model, x)
plan = tw.Plan.of(
    graph,
    {"features.*": f"h{p}", "features.8": f"n{p}", "classifier.[146]": f"f{p}"},
)
pmodel = tw.parallelize(model, x, plan, mesh=mesh)
y = pmodel.gather(pmodel(pmodel.scatter(x)))

model.eval(), pmodel.eval()
with torch.no_grad():
    difference = (pmodel.gather(pmodel(pmodel.scatter(x))) - model(x)).abs().max().item()
if mesh.rank == 0:
    print(plan)
    held = sum(parameter.numel() for parameter in pmodel.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank 0 holds {held:,} of {whole:,} parameters")
    print(f"output {tuple(y.shape)}, largest difference from one device {difference:.1e}")
